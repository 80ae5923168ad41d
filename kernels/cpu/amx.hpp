// Multiplies bf16 matrices in the tile registers of AMX, sixteen times as fast as dpbf16. Where a build has no AMX, the
// same tiles can be computed in plain C++, slowly: so that tests reach their arithmetic on every machine.
#pragma once
#include "tiles.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

// Returns whether this process may use the tile registers, for which it must ask the system once.
inline bool has_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return allowed;
}

// Compilers do not know what memory the intrinsics of tiles read: here all that was stored before is there.
#define SETTLE_MEMORY asm volatile("" ::: "memory")

// While it lives, each of this thread's eight tiles has 16 rows of 64 bytes.
struct Tiles {
    explicit Tiles(bool on) : on(on) {
        alignas(LINE) struct {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) config.bytes[i] = LINE, config.rows[i] = 16;
        SETTLE_MEMORY;
        if (on) _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (on) _tile_release();
    }
    bool on;
};

// The compiler's intrinsics take the number of a tile as a literal; strides are in bytes.
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT(sum, a, b) _tile_dpbf16ps(sum, a, b)
#define TILE_DOT_BYTES(sum, a, b) _tile_dpbssd(sum, a, b)

#else

#define SETTLE_MEMORY

// Whether tests asked for the plain tiles when they loaded this library.
static const bool plain_tiles_asked = std::getenv("KV_HARNESS_PLAIN_TILES");
inline bool has_tiles() { return plain_tiles_asked; }

struct Tiles {
    explicit Tiles(bool) {}
};

struct PlainTile {
    u32 row[16];
};
inline thread_local PlainTile plain_tiles[8];

// Adds to tile `sum` the product of `a` [16][16 pairs] and `b` [16 pairs][16].
inline void plain_dot(int sum, int a, int b) {
    for (int m = 0; m < 16; m++) {
        f32 row = (f32)plain_tiles[sum].row[m];
        for (int pair = 0; pair < 16; pair++)
            row = dot_pairs(row, splat(plain_tiles[a].row[m][pair]), plain_tiles[b].row[pair]);
        plain_tiles[sum].row[m] = (u32)row;
    }
}
// Does so for whole numbers of 8 bits, `a` [16][16 fours] and `b` [16 fours][16].
inline void plain_dot_bytes(int sum, int a, int b) {
    auto byte = [](uint32_t word, int i) { return (int8_t)(word >> 8 * i); };
    for (int m = 0; m < 16; m++)
        for (int four = 0; four < 16; four++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 4; i++)
                    plain_tiles[sum].row[m][n] += byte(plain_tiles[a].row[m][four], i) * byte(plain_tiles[b].row[four][n], i);
}
inline void plain_load(int tile, const void* from, int64_t stride) {
    for (int m = 0; m < 16; m++) plain_tiles[tile].row[m] = load<u32>((const char*)from + m * stride);
}
inline void plain_store(int tile, void* to, int64_t stride) {
    for (int m = 0; m < 16; m++) store((char*)to + m * stride, plain_tiles[tile].row[m]);
}

#define TILE_ZERO(tile) plain_tiles[tile] = {}
#define TILE_LOAD(tile, from, stride) plain_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) plain_store(tile, to, stride)
#define TILE_DOT(sum, a, b) plain_dot(sum, a, b)
#define TILE_DOT_BYTES(sum, a, b) plain_dot_bytes(sum, a, b)

#endif

// Computes c[32][32] = or += a[32][steps of 16 words] times b[steps of 16 words][32]; strides are in words. With `AHEAD`
// the 32 rows behind those of `a` are fetched into the cache meanwhile.
template <bool ADD, bool AHEAD = false>
inline void multiply_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                           int64_t c_stride, int steps) {
    const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
    SETTLE_MEMORY;
    if (ADD) {
        TILE_LOAD(0, c, c_bytes);
        TILE_LOAD(1, c + 16, c_bytes);
        TILE_LOAD(2, c + 16 * c_stride, c_bytes);
        TILE_LOAD(3, c + 16 * c_stride + 16, c_bytes);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int s = 0; s < steps; s++) {
        if (AHEAD)
            UNROLL for (int row = 32; row < 64; row++) __builtin_prefetch(a + row * a_stride + s * 16);
        TILE_LOAD(4, a + s * 16, a_bytes);
        TILE_LOAD(6, b + s * 16 * b_stride, b_bytes);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + s * 16 * b_stride + 16, b_bytes);
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, a + 16 * a_stride + s * 16, a_bytes);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, c, c_bytes);
    TILE_STORE(1, c + 16, c_bytes);
    TILE_STORE(2, c + 16 * c_stride, c_bytes);
    TILE_STORE(3, c + 16 * c_stride + 16, c_bytes);
}

template <class T> bool uses_tiles() { return std::is_same_v<T, BF16> && has_tiles(); }

// Returns whether torch multiplies bf16 on tiles and this build cannot: KV_HARNESS_MARCH names a lesser processor than
// this one. `limit` is the variable in which a user may tell the library that torch calls to leave tiles alone.
inline bool torch_alone_has_tiles([[maybe_unused]] const char* limit) {
#if defined(__x86_64__) && !defined(__AMX_BF16__)
    unsigned a, b, c, d;
    bool processor_has_tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1;
    return processor_has_tiles && !has_tiles() && !std::getenv(limit);
#else
    return false;
#endif
}
