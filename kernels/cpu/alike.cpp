// Finds for each vector the last other one that is like it (R-KV), among all of a sequence.
//
// Products of the vectors rounded to bf16 say which pairs may be alike; only these are multiplied in fp32. So the result is
// that of fp32 at the speed of bf16. Where few pairs are alike, AMX tiles multiply whole numbers of 8 bits first, twice as
// fast: these say which blocks have any such pair. Each pair is compared once, for both. Searches begin at the end and go
// no further than needed: text repeats itself, and most keys find one soon.
#include "amx.hpp"
#include "calls.hpp"

constexpr float ONE = 127;  // a one in whole numbers of 8 bits
typedef int8_t sixteen_numbers __attribute__((vector_size(16)));

static void narrow(int8_t* to, f32 x) {
    i32 nearest = (i32)(x * ONE + 12582912.0f) - 0x4b400000;  // the whole part lands in the lowest bits
    store(to, convert<sixteen_numbers>(nearest));
}
static i32 maximum(i32 a, i32 b) { return select(a > b, a, b); }

namespace {

constexpr int BLOCK = 32;  // vectors of a block, which two tiles hold: as many search together
constexpr int64_t MOST_ROWS = 2048, BLOCKS = 32;  // of a task, and those that all of it is compared with next: they fit L2
constexpr float DOUBT = 0.01f;  // above what rounding two unit vectors to bf16 changes their product by, 2^-8

// Holds all vectors of one KV head, row by row, in numbers of fewer bits. Zeros fill up rows and the last block.
template <class Number> struct Packed {
    static constexpr int EACH = 4 / sizeof(Number);  // numbers of a word
    int64_t words;
    Buffer<uint32_t> rows;

    Packed(const float* x, int64_t count, int64_t dim)
        : words((dim + EACH * LANES - 1) / (EACH * LANES) * LANES), rows((count + BLOCK - 1) / BLOCK * BLOCK * words) {
        each_task((count + BLOCK - 1) / BLOCK, count > 512, [&](int64_t block) {
            for (int64_t r = block * BLOCK; r < std::min(block * BLOCK + BLOCK, count); r++) {
                Number* to = (Number*)&rows[r * words];
                int64_t c = 0;
                for (; c + LANES <= dim; c += LANES) narrow(to + c, load<f32>(x + r * dim + c));
                f32 rest = {};
                std::memcpy(&rest, x + r * dim + c, 4 * (dim - c));
                if (c < dim) narrow(to + c, rest);
            }
        });
    }
    const uint32_t* block(int64_t number) const { return &rows[number * BLOCK * words]; }

    // Returns a block [words][BLOCK], by which others are multiplied.
    Buffer<uint32_t> columns(int64_t number) const {
        Buffer<uint32_t> out(words * BLOCK);
        for (int64_t w = 0; w < words; w += LANES)
            for (int r = 0; r < BLOCK; r += LANES) {
                u32 part[LANES];
                for (int i = 0; i < LANES; i++) part[i] = load<u32>(block(number) + (r + i) * words + w);
                transpose(part);
                for (int i = 0; i < LANES; i++) store(&out[(w + i) * BLOCK + r], part[i]);
            }
        return out;
    }
};

// Returns the largest of a block's products, lane by lane: most blocks have none that matters.
template <class V> V largest_of_each(const void* products) {
    auto at = [&](int i) { return load<V>((const char*)products + i * LINE); };
    V most[4] = {at(0), at(1), at(2), at(3)};  // which do not wait for one another
    for (int v = 4; v < BLOCK * BLOCK / LANES; v += 4) UNROLL for (int i = 0; i < 4; i++) most[i] = maximum(most[i], at(v + i));
    return maximum(maximum(most[0], most[1]), maximum(most[2], most[3]));
}

// Returns of which of the BLOCK numbers at x `test` is true, of the first in the lowest bit.
template <class V, class F> uint32_t which(const void* x, F test) {
    return bits_of(test(load<V>(x))) | bits_of(test(load<V>((const char*)x + LINE))) << LANES;
}

// Raises a number that other threads may raise too.
void raise_to(int32_t* number, int32_t to) {
    int32_t seen = __atomic_load_n(number, __ATOMIC_RELAXED);
    while (seen < to && !__atomic_compare_exchange_n(number, &seen, to, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// Compares the vectors of block number `own` with those after them, and notes for both in `found` the largest number of
// one that is like it. What another thread has just found may be seen late, which costs work but changes no result.
struct Search {
    const LastAlike& call;
    const float* x;
    const Packed<bf16>& fine;
    const Packed<int8_t>& coarse;
    int32_t* found;
    const bool by_tiles;
    const int64_t own, first = own * BLOCK, end = std::min(first + BLOCK, call.count);
    const Buffer<uint32_t> columns = fine.columns(own), coarse_columns = coarse.columns(own);
    const float limit = (float)call.threshold;
    // Rounding changes a number by 0.5 / ONE at most, and so a product by the length of two such changes.
    const float coarse_limit = limit - std::sqrt((float)call.dim) * 1.001f / ONE - call.dim / (4 * ONE * ONE);
    int64_t open = end - first;  // vectors that are like none after them, so far
    bool screens = by_tiles;     // does not pay where whole numbers spare few blocks the products in bf16

    // Compares with the BLOCKS blocks before block `stop`, the last one first.
    void run(int64_t stop) {
        const int64_t lowest = std::max(stop - BLOCKS, own);
        uint32_t blocks = 0;  // of use, that with number `lowest` in the lowest bit
        for (int64_t block = lowest; block < stop; block++) blocks |= (uint32_t)is_of_use(block) << (block - lowest);
        int some = __builtin_popcount(blocks), near = 0;
        if (screens) blocks = screened(lowest, blocks);
        for (int64_t block = stop - 1; block >= lowest; block--)
            if (blocks >> (block - lowest) & 1 && is_of_use(block)) near += compare(block);
        screens = by_tiles && 2 * near <= some;
    }

    // Of a block's vectors, one that is like a vector at or after `end` has no use for an earlier one.
    bool is_of_use(int64_t block) const {
        return open || which<i32>(found + block * BLOCK, [&](i32 last) { return last < (int32_t)end - 1; });
    }

    // Returns those of `blocks` that may have a pair that is alike, by products of whole numbers: vectors look at those of one
    // block while tiles multiply the next.
    uint32_t screened(int64_t lowest, uint32_t blocks) const {
        alignas(LINE) int32_t products[2][BLOCK * BLOCK];
        const int32_t bar = (int32_t)(coarse_limit * ONE * ONE - 1);
        const int64_t words = coarse.words, row = 4 * words, column = 4 * BLOCK;
        uint32_t alike = 0;
        int before = -1, turn = 0;
        auto look = [&] {
            if (before >= 0) alike |= (uint32_t)any(largest_of_each<i32>(products[turn]) > bar) << before;
        };
        for (; blocks; blocks &= blocks - 1) {
            const int block = __builtin_ctz(blocks);
            const uint32_t *a = coarse.block(lowest + block), *b = coarse_columns.data();
            SETTLE_MEMORY;
            TILE_ZERO(0);
            TILE_ZERO(1);
            TILE_ZERO(2);
            TILE_ZERO(3);
            for (int64_t at = 0; at < words; at += LANES, a += LANES, b += LANES * BLOCK) {
                TILE_LOAD(4, a, row);
                TILE_LOAD(6, b, column);
                TILE_DOT_BYTES(0, 4, 6);
                TILE_LOAD(7, b + LANES, column);
                TILE_DOT_BYTES(1, 4, 7);
                TILE_LOAD(5, a + LANES * words, row);
                TILE_DOT_BYTES(2, 5, 6);
                TILE_DOT_BYTES(3, 5, 7);
            }
            look();
            int32_t* to = products[turn ^= 1];
            TILE_STORE(0, to, column);
            TILE_STORE(1, to + LANES, column);
            TILE_STORE(2, to + LANES * BLOCK, column);
            TILE_STORE(3, to + LANES * BLOCK + LANES, column);
            before = block;
        }
        look();
        return alike;
    }

    // Compares with one block, and returns whether screening would have asked for that.
    bool compare(int64_t block) {
        alignas(LINE) float products[BLOCK * BLOCK];
        multiply(fine.block(block), products);
        const f32 largest = largest_of_each<f32>(products);
        if (any(largest > limit - DOUBT))
            for (int64_t r = std::min<int64_t>(BLOCK, call.count - block * BLOCK); r--;)
                look_for(block * BLOCK + r, products + r * BLOCK);
        return any(largest > coarse_limit);
    }

    // Compares vector j with those of its products that come before it.
    void look_for(int64_t j, const float* products) {
        uint32_t alike = which<f32>(products, [&](f32 product) { return product > limit - DOUBT; });
        if (j < end) alike &= (1u << (j - first)) - 1;
        if (found[j] >= end - 1) alike &= which<i32>(found + first, [&](i32 last) { return last < (int32_t)j; });
        while (alike) {
            const int last = 31 - __builtin_clz(alike);
            const int64_t i = first + last;
            alike ^= 1u << last;
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

    // Computes products[BLOCK][BLOCK] of a block and the vectors that search.
    void multiply(const uint32_t* block, float* products) const {
        const int64_t words = fine.words;
        const uint32_t* b = columns.data();
        if (by_tiles) return multiply_tiles<false>(block, words, b, BLOCK, products, BLOCK, words / LANES);
        for (int r = 0; r < BLOCK; r += TILE_ROWS) {
            const uint32_t* four[TILE_ROWS];
            for (int i = 0; i < TILE_ROWS; i++) four[i] = block + (r + i) * words;
            f32 sums[TILE_ROWS][2] = {};
            ::multiply<BF16, 2>(four, b, BLOCK, words, sums);
            std::memcpy(products + r * BLOCK, sums, sizeof sums);
        }
    }
};

}  // namespace

EXPORT void last_alike(const LastAlike& call) {
    const bool by_tiles = has_tiles();
    const int64_t blocks = (call.count + BLOCK - 1) / BLOCK;
    const int64_t each = std::clamp<int64_t>(blocks / (8 * omp_get_max_threads()), 1, MOST_ROWS / BLOCK);
    for (int64_t pair = 0; pair < call.pairs; pair++) {
        const float* x = call.units + pair * call.count * call.dim;
        const Packed<bf16> fine(x, call.count, call.dim);
        const Packed<int8_t> coarse(x, call.count, call.dim);
        Buffer<int32_t> found(blocks * BLOCK);
        std::fill(found.begin(), found.begin() + call.count, -1);
        std::fill(found.begin() + call.count, found.end(), INT32_MAX);  // beyond the last, where nothing is sought
        each_task((blocks + each - 1) / each, true, [&](int64_t task) {
            Tiles tiles(by_tiles);
            std::vector<Search> searches;  // the last first: what it finds spares others work
            searches.reserve(each);
            const int64_t after = blocks - task * each, least = std::max<int64_t>(after - each, 0);
            for (int64_t own = after - 1; own >= least; own--)
                searches.push_back({call, x, fine, coarse, found.data(), by_tiles, own});
            for (int64_t stop = blocks; stop > least; stop -= BLOCKS)
                for (Search& search : searches) search.run(stop);
        });
        for (int64_t i = 0; i < call.count; i++) call.last[pair * call.count + i] = std::max(found[i], 0);
    }
}

EXPORT int64_t is_on_tiles() { return has_tiles(); }
