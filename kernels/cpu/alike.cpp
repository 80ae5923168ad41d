// Finds for each vector the last other one that is like it (R-KV), among all of a sequence.
//
// Products of the vectors rounded to bf16 say which pairs may be alike; only these are multiplied in fp32. So the result is
// that of fp32 at the speed of bf16. On AMX tiles, products of whole numbers of 8 bits, twice as fast, say first whether a
// block has any such pair. Each pair is compared once, for both. Searches begin at the end and go no further than needed:
// text repeats itself, and most keys find one soon.
#include "amx.hpp"
#include "calls.hpp"

constexpr float ONE = 127;  // a one in whole numbers of 8 bits
typedef int8_t sixteen_numbers __attribute__((vector_size(16)));

static void narrow(int8_t* to, f32 x) {
    i32 nearest = (i32)(x * ONE + 12582912.0f) - 0x4b400000;  // the whole part lands in the lowest bits
    store(to, __builtin_convertvector(nearest, sixteen_numbers));
}
static i32 maximum(i32 a, i32 b) { return a > b ? a : b; }

namespace {

constexpr int BLOCK = 32;  // vectors of a block, which two tiles hold
constexpr int ROWS = 64;   // vectors that search together: with the numbers of a block they fit L1
constexpr int64_t MOST_ROWS = 2048, BLOCKS = 32;  // of a task, and those that all of it is compared with next: they fit L2
constexpr float DOUBT = 0.01f;  // above what rounding two unit vectors to bf16 changes their product by, 2^-8

// Holds all vectors of one KV head in numbers of fewer bits: row by row, and block by block [words][BLOCK]. Zeros fill both up.
template <class Number> struct Packed {
    static constexpr int EACH = 4 / sizeof(Number);  // numbers of a word
    int64_t words, blocks;
    Buffer<uint32_t> rows, columns;

    Packed(const float* x, int64_t count, int64_t dim)
        : words((dim + EACH * LANES - 1) / (EACH * LANES) * LANES), blocks((count + BLOCK - 1) / BLOCK),
          rows((count + ROWS - 1) / ROWS * ROWS * words), columns(blocks * BLOCK * words) {
        each_task(blocks, count > 512, [&](int64_t block) {
            const char* at[BLOCK];
            int n = std::min<int64_t>(BLOCK, count - block * BLOCK);
            for (int r = 0; r < n; r++) {
                Number* to = (Number*)&rows[(block * BLOCK + r) * words];
                const float* from = x + (block * BLOCK + r) * dim;
                int64_t c = 0;
                for (; c + LANES <= dim; c += LANES) narrow(to + c, load<f32>(from + c));
                if (c < dim) {
                    alignas(LINE) float rest[LANES] = {};
                    std::copy(from + c, from + dim, rest);
                    narrow(to + c, load<f32>(rest));
                }
                at[r] = (const char*)to;
            }
            transpose(at, n, words, &columns[block * BLOCK * words], BLOCK);
        });
    }
    const uint32_t* row(int64_t i) const { return &rows[i * words]; }
    const uint32_t* column(int64_t block) const { return &columns[block * BLOCK * words]; }
};

// Returns the largest of a block's products, lane by lane: most blocks have none that matters.
template <class V> V largest_of_each(const void* products) {
    auto at = [&](int i) { return load<V>((const char*)products + i * LINE); };
    V most[4] = {at(0), at(1), at(2), at(3)};  // which do not wait for one another
    for (int v = 4; v < BLOCK * BLOCK / LANES; v += 4) UNROLL for (int i = 0; i < 4; i++) most[i] = maximum(most[i], at(v + i));
    return maximum(maximum(most[0], most[1]), maximum(most[2], most[3]));
}

// Raises a number that other threads may raise too.
void raise_to(int32_t* number, int32_t to) {
    int32_t seen = __atomic_load_n(number, __ATOMIC_RELAXED);
    while (seen < to && !__atomic_compare_exchange_n(number, &seen, to, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// Compares the ROWS vectors from `first` on with those after them, and notes for both in `found` the largest number of
// one that is like it. What another thread has just found may be seen late, which costs work but changes no result.
struct Search {
    const LastAlike& call;
    const float* x;
    const Packed<bf16>& packed;
    const Packed<int8_t>& coarse;
    int32_t* found;
    const bool by_tiles;
    const int64_t first, end = std::min<int64_t>(first + ROWS, call.count);
    const float limit = (float)call.threshold;
    // Rounding changes a number by 0.5 / ONE at most, and so a product by the length of two such changes.
    const float coarse_limit = limit - std::sqrt((float)call.dim) * 1.001f / ONE - call.dim / (4 * ONE * ONE);
    int64_t open = end - first;      // vectors that are like none after them, so far
    bool begin_coarse = by_tiles;    // does not pay where the block before had a pair of which whole numbers say too little

    // Compares with the BLOCKS blocks before block `stop`.
    void run(int64_t stop) {
        for (int64_t block = stop - 1; block >= std::max(stop - BLOCKS, first / BLOCK); block--) {
            const int32_t* others = found + block * BLOCK;
            // of others, one that is like a vector at or after `end` has no use for an earlier one
            int32_t least = std::min(smallest(load<i32>(others)), smallest(load<i32>(others + LANES)));
            if (!open && least >= end - 1) continue;
            for (int64_t part = first; part < std::min(end, block * BLOCK + BLOCK); part += BLOCK) compare(part, block);
        }
    }

    void compare(int64_t part, int64_t block) {
        alignas(LINE) float products[BLOCK * BLOCK];
        if (begin_coarse) {
            multiply_tiles<false, true>(coarse.row(part), coarse.words, coarse.column(block), BLOCK, products, BLOCK,
                                        coarse.words / LANES);
            if (!any(largest_of_each<i32>(products) > (int32_t)(coarse_limit * ONE * ONE - 1))) return;
        }
        multiply(part, block, products);
        const f32 largest = largest_of_each<f32>(products);
        begin_coarse = by_tiles && !any(largest > coarse_limit);
        if (!any(largest > limit - DOUBT)) return;
        const int64_t from = block * BLOCK;
        for (int64_t i = part; i < std::min(part + BLOCK, end); i++)
            for (int64_t j = std::min(from + BLOCK, call.count) - 1; j > std::max(i, from - 1); j--) {
                if (products[(i - part) * BLOCK + j - from] <= limit - DOUBT) continue;
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

    // Computes products[BLOCK][BLOCK] of the vectors from `part` on and a block.
    void multiply(int64_t part, int64_t block, float* products) const {
        if (by_tiles) {
            multiply_tiles<false>(packed.row(part), packed.words, packed.column(block), BLOCK, products, BLOCK,
                                  packed.words / LANES);
            return;
        }
        for (int r = 0; r < BLOCK; r += TILE_ROWS) {
            const uint32_t* four[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) four[i] = packed.row(part + r + i);
            f32 sums[TILE_ROWS][2] = {};
            ::multiply<BF16, 2>(four, packed.column(block), BLOCK, packed.words, sums);
            std::memcpy(products + r * BLOCK, sums, sizeof sums);
        }
    }
};

}  // namespace

EXPORT void last_alike(const LastAlike& call) {
    const bool by_tiles = has_tiles();
    const int64_t share = call.count / (8 * omp_get_max_threads()) / ROWS * ROWS;
    const int64_t each = std::clamp<int64_t>(share, ROWS, MOST_ROWS), tasks = (call.count + each - 1) / each;
    for (int64_t pair = 0; pair < call.pairs; pair++) {
        const float* x = call.units + pair * call.count * call.dim;
        const Packed<bf16> packed(x, call.count, call.dim);
        const Packed<int8_t> coarse(x, by_tiles ? call.count : 0, call.dim);
        Buffer<int32_t> found(packed.blocks * BLOCK);
        std::fill(found.begin(), found.begin() + call.count, -1);
        std::fill(found.begin() + call.count, found.end(), INT32_MAX);  // beyond the last, where nothing is sought
        each_task(tasks, true, [&](int64_t task) {
            Tiles tiles(by_tiles);
            std::vector<Search> searches;
            const int64_t from = (tasks - 1 - task) * each, end = std::min(from + each, call.count);
            for (int64_t first = from; first < end; first += ROWS)
                searches.push_back({call, x, packed, coarse, found.data(), by_tiles, first});
            for (int64_t stop = packed.blocks; stop * BLOCK > from; stop -= BLOCKS)
                for (Search& search : searches) search.run(stop);
        });
        for (int64_t i = 0; i < call.count; i++) call.last[pair * call.count + i] = std::max(found[i], 0);
    }
}
