// Finds for each vector the last other one that is like it (R-KV), among all of a sequence.
//
// Products of the vectors rounded to bf16, on AMX tiles where there are any, say which pairs may be alike; only these are
// multiplied in fp32. So the result is that of fp32 at the speed of bf16. Each pair is compared once, for both. Searches
// begin at the end and go no further than needed: text repeats itself, and most keys find one soon.
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

// Returns the largest of a block's products, lane by lane: most blocks have none that matters.
f32 largest_of_each(const float* products) {
    f32 most[4];  // which do not wait for one another
    UNROLL for (int i = 0; i < 4; i++) most[i] = load<f32>(products + i * LANES);
    for (int at = 4 * LANES; at < BLOCK * BLOCK; at += 4 * LANES)
        UNROLL for (int i = 0; i < 4; i++) most[i] = maximum(most[i], load<f32>(products + at + i * LANES));
    return maximum(maximum(most[0], most[1]), maximum(most[2], most[3]));
}

// Raises a number that other threads may raise too.
void raise_to(int32_t* number, int32_t to) {
    int32_t seen = __atomic_load_n(number, __ATOMIC_RELAXED);
    while (seen < to && !__atomic_compare_exchange_n(number, &seen, to, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// Compares the ROWS vectors from `first` on with those after them, and notes for both in `found` the largest number of
// one that is like it. What another thread has just found may be seen late, which costs work but changes no result.
void search(const LastAlike& call, const float* x, const Packed& packed, int64_t first, int32_t* found) {
    const bool by_tiles = has_tiles();
    const float limit = (float)call.threshold;
    const int64_t end = std::min<int64_t>(first + ROWS, call.count);
    alignas(LINE) float products[BLOCK * BLOCK];
    Tiles tiles(by_tiles);
    int64_t open = end - first;  // vectors that are like none after them, so far
    for (int64_t block = packed.blocks - 1; block * BLOCK + BLOCK > first; block--) {
        int32_t* others = found + block * BLOCK;
        // of others, one that is like a vector at or after `end` has no use for an earlier one
        int32_t least = std::min(smallest(load<i32>(others)), smallest(load<i32>(others + LANES)));
        if (!open && least >= end - 1) continue;
        for (int64_t part = first; part < std::min(end, block * BLOCK + BLOCK); part += BLOCK) {
            multiply_block(&packed.rows[part * packed.words], &packed.columns[block * BLOCK * packed.words],
                           packed.words, by_tiles, products);
            if (!any(largest_of_each(products) > limit - DOUBT)) continue;
            for (int64_t i = part; i < std::min(part + BLOCK, end); i++)
                for (int64_t j = std::min(block * BLOCK + BLOCK, call.count) - 1; j > std::max(i, block * BLOCK - 1); j--) {
                    if (products[(i - part) * BLOCK + j - block * BLOCK] <= limit - DOUBT) continue;
                    if (found[i] >= j && found[j] >= i) continue;
                    float exact = 0;
#pragma omp simd reduction(+ : exact)
                    for (int64_t c = 0; c < call.dim; c++) exact += x[i * call.dim + c] * x[j * call.dim + c];
                    if (!(exact > limit)) continue;
                    open -= found[i] <= i;
                    raise_to(found + i, j);
                    raise_to(found + j, i);
                }
        }
    }
}

}  // namespace

EXPORT void last_alike(const LastAlike& call) {
    const int64_t tasks = (call.count + ROWS - 1) / ROWS;
    for (int64_t pair = 0; pair < call.pairs; pair++) {
        const float* x = call.units + pair * call.count * call.dim;
        Packed packed(x, call.count, call.dim);
        Buffer<int32_t> found(packed.blocks * BLOCK);
        std::fill(found.begin(), found.begin() + call.count, -1);
        std::fill(found.begin() + call.count, found.end(), INT32_MAX);  // beyond the last, where nothing is sought
        each_task(tasks, true, [&](int64_t task) { search(call, x, packed, (tasks - 1 - task) * ROWS, found.data()); });
        for (int64_t i = 0; i < call.count; i++) call.last[pair * call.count + i] = std::max(found[i], 0);
    }
}
