// Finds for each vector the last other one that is like it (R-KV), among all of a sequence.
//
// Products of the vectors rounded to bf16, on AMX tiles where there are any, say which pairs may be alike; only these are
// multiplied in fp32. So the result is that of fp32 at the speed of bf16. Blocks are passed from the last one on, and no
// further than needed: text repeats itself, and most keys find one soon.
#include "amx.hpp"
#include "calls.hpp"

namespace {

constexpr int BLOCK = 32;  // vectors of a block, which two tiles hold
constexpr int ROWS = 128;  // vectors that search together, so that each block is read once for all of them
constexpr float DOUBT = 0.01f;  // above what rounding two unit vectors to bf16 changes their product by, 2^-8

// Holds all vectors of one KV head in bf16: row by row, and block by block [words][BLOCK]. Zeros fill both up.
struct Packed {
    int64_t words, blocks;
    Buffer<uint32_t> rows, columns;

    Packed(const float* x, int64_t count, int64_t dim)
        : words((dim + 2 * LANES - 1) / (2 * LANES) * LANES), blocks((count + BLOCK - 1) / BLOCK),
          rows((count + ROWS - 1) / ROWS * ROWS * words), columns(blocks * BLOCK * words) {
        each_task(blocks, count > 512, [&](int64_t block) {
            const char* at[BLOCK];
            int n = std::min<int64_t>(BLOCK, count - block * BLOCK);
            for (int r = 0; r < n; r++) {
                uint32_t* to = &rows[(block * BLOCK + r) * words];
                for (int64_t c = 0; c < dim; c++) put((bf16*)to + c, x[(block * BLOCK + r) * dim + c]);
                at[r] = (const char*)to;
            }
            transpose(at, n, words, &columns[block * BLOCK * words], BLOCK);
        });
    }
};

// Computes products[BLOCK][BLOCK] of a block of rows and one of columns.
void multiply_block(const uint32_t* rows, const uint32_t* columns, int64_t words, bool by_tiles, float* products) {
    if (by_tiles) {
        multiply_tiles<false>(rows, words, columns, BLOCK, products, BLOCK, words / LANES);
        return;
    }
    for (int r = 0; r < BLOCK; r += TILE_ROWS) {
        const uint32_t* four[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS; i++) four[i] = rows + (r + i) * words;
        f32 sums[TILE_ROWS][2] = {};
        multiply<BF16, 2>(four, columns, BLOCK, words, sums);
        std::memcpy(products + r * BLOCK, sums, sizeof sums);
    }
}

// Finds what the vectors from `first` on are like; `last` has a number for each of them, -1 until it is found.
void search(const LastAlike& call, const float* x, const Packed& packed, int64_t first, int64_t* last) {
    const bool by_tiles = has_tiles();
    const float limit = (float)call.threshold;
    const int64_t count = std::min<int64_t>(ROWS, call.count - first);
    alignas(LINE) float products[BLOCK * BLOCK];
    Tiles tiles(by_tiles);
    int64_t open = count;
    for (int64_t block = packed.blocks - 1; block >= 0 && open; block--) {
        for (int64_t part = 0; part < count; part += BLOCK) {
            multiply_block(&packed.rows[(first + part) * packed.words], &packed.columns[block * BLOCK * packed.words],
                           packed.words, by_tiles, products);
            for (int64_t r = part; r < std::min(part + BLOCK, count); r++) {
                const float* row = products + (r - part) * BLOCK;
                if (last[r] >= 0 || !any(maximum(load<f32>(row), load<f32>(row + LANES)) > limit - DOUBT)) continue;
                for (int64_t c = BLOCK - 1; c >= 0 && last[r] < 0; c--) {
                    int64_t other = block * BLOCK + c;
                    if (row[c] <= limit - DOUBT || other == first + r || other >= call.count) continue;
                    const float *a = x + (first + r) * call.dim, *b = x + other * call.dim;
                    float exact = 0;
#pragma omp simd reduction(+ : exact)
                    for (int64_t i = 0; i < call.dim; i++) exact += a[i] * b[i];
                    if (exact > limit) last[r] = other, open--;
                }
            }
        }
    }
    for (int64_t r = 0; r < count; r++) last[r] = std::max<int64_t>(last[r], 0);
}

}  // namespace

EXPORT void last_alike(const LastAlike& call) {
    std::fill_n(call.last, call.pairs * call.count, -1);
    for (int64_t pair = 0; pair < call.pairs; pair++) {
        const float* x = call.units + pair * call.count * call.dim;
        Packed packed(x, call.count, call.dim);
        each_task((call.count + ROWS - 1) / ROWS, true, [&](int64_t task) {
            search(call, x, packed, task * ROWS, call.last + pair * call.count + task * ROWS);
        });
    }
}
