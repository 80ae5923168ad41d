// The processor's matrix unit (AMX), where there is one: sixteen rows of bf16 pairs at a time.
#pragma once
#include "simd.hpp"
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int64_t STEP_WORDS = 16;  // pairs summed over in a step
inline int64_t padded(int64_t words) { return (words + STEP_WORDS - 1) / STEP_WORDS * STEP_WORDS; }

#if defined(__AMX_BF16__) && defined(__linux__)

// The system must be asked once per process, before the first use.
inline bool has_matrix_unit() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return granted;
}

// Holds the unit for a thread. Tiles 0 to 3 are sums, 4 is a step of the rows, 5 and 6 are of the columns.
struct MatrixUnit {
    bool on;

    explicit MatrixUnit(bool on) : on(on) {
        if (!on) return;
        struct alignas(LINE) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {LINE, LINE, LINE, LINE, LINE, LINE, LINE};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16};
        } shape;
        _tile_loadconfig(&shape);
    }
    ~MatrixUnit() {
        if (on) _tile_release();
    }

    // Sixteen rows of `words` words, side by side, times V (2 or 4) vectors of every row of b, `stride` words apart.
    template <int V>
    void products(const uint32_t* rows, const uint32_t* b, int64_t stride, int64_t words, f32 (&out)[16][V]) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t w = 0; w < words; w += STEP_WORDS, b += STEP_WORDS * stride) {
            _tile_loadd(4, rows + w, words * 4);
            _tile_loadd(5, b, stride * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, b + LANES, stride * 4);
            _tile_dpbf16ps(1, 4, 6);
            if (V == 2) continue;
            _tile_loadd(5, b + 2 * LANES, stride * 4);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, b + 3 * LANES, stride * 4);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, &out[0][0], sizeof *out);
        _tile_stored(1, &out[0][1], sizeof *out);
        if (V == 2) return;
        _tile_stored(2, &out[0][2], sizeof *out);
        _tile_stored(3, &out[0][3], sizeof *out);
    }
};

#else

inline bool has_matrix_unit() { return false; }

struct MatrixUnit {
    static constexpr bool on = false;
    explicit MatrixUnit(bool) {}
    template <int V> void products(const uint32_t*, const uint32_t*, int64_t, int64_t, f32 (&)[16][V]) {}
};

#endif
