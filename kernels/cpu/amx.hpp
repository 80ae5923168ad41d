// Multiplies bf16 matrices on AMX tiles, if the processor has them and the system allows it: sixteen times dpbf16.
#pragma once
#include "tiles.hpp"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

constexpr bool AMX_BUILT = true;

// A process must ask for the tile registers once.
inline bool amx_allowed() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return allowed;
}

// While it lives, this thread's eight tiles have 16 rows of 64 bytes; those of b and c have fewer columns on request.
struct Tiles {
    explicit Tiles(bool on, int columns = 16) : on(on) {
        alignas(LINE) struct {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) config.bytes[i] = i == 4 || i == 5 ? LINE : 4 * columns, config.rows[i] = 16;
        if (on) _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (on) _tile_release();
    }
    bool on;
};

// c[32][32] = or += a[32][steps of 16 words] times b[steps of 16 words][32]; strides in words.
template <bool ADD>
inline void multiply_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                           int64_t c_stride, int steps) {
    const int64_t as = 4 * a_stride, bs = 4 * b_stride, cs = 4 * c_stride;
    if (ADD) {
        _tile_loadd(0, c, cs);
        _tile_loadd(1, c + 16, cs);
        _tile_loadd(2, c + 16 * c_stride, cs);
        _tile_loadd(3, c + 16 * c_stride + 16, cs);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int s = 0; s < steps; s++) {
        _tile_loadd(4, a + s * 16, as);
        _tile_loadd(5, a + 16 * a_stride + s * 16, as);
        _tile_loadd(6, b + s * 16 * b_stride, bs);
        _tile_loadd(7, b + s * 16 * b_stride + 16, bs);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, cs);
    _tile_stored(1, c + 16, cs);
    _tile_stored(2, c + 16 * c_stride, cs);
    _tile_stored(3, c + 16 * c_stride + 16, cs);
}

// c[32][columns] = a[32][steps of 16 words], rows a_bytes apart, times b[steps of 16 words][columns].
inline void multiply_narrow(const void* a, int64_t a_bytes, const uint32_t* b, float* c, int columns, int steps) {
    _tile_zero(0);
    _tile_zero(1);
    for (int s = 0; s < steps; s++) {
        _tile_loadd(4, (const char*)a + s * LINE, a_bytes);
        _tile_loadd(5, (const char*)a + 16 * a_bytes + s * LINE, a_bytes);
        _tile_loadd(6, b + s * 16 * columns, 4 * columns);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, c, 4 * columns);
    _tile_stored(1, c + 16 * columns, 4 * columns);
}

#else

constexpr bool AMX_BUILT = false;
inline bool amx_allowed() { return false; }
struct Tiles {
    explicit Tiles(bool, int = 16) {}
};
template <bool ADD>
inline void multiply_tiles(const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t, int) {}
inline void multiply_narrow(const void*, int64_t, const uint32_t*, float*, int, int) {}

#endif

template <class T> bool uses_tiles() { return AMX_BUILT && std::is_same_v<T, BF16Words> && amx_allowed(); }
