// Rebuilds keys from their low-rank factors and rotates them before they leave the registers (ShadowKV).
#include <type_traits>

#include "amx.hpp"
#include "calls.hpp"

namespace {

using Call = RebuildKeys;

// Returns row `at` of x, whose rows are `stride` bytes apart.
template <class E> const E* row_of(const void* x, int64_t stride, int64_t at) {
    return (const E*)((const char*)x + at * stride);
}

inline f32 load_floats(const float* x) { return load<f32>(x); }
inline f32 load_floats(const bf16* x) {
    typedef uint16_t u16 __attribute__((vector_size(32)));
    return (f32)(__builtin_convertvector(load<u16>(x), u32) << 16);
}
inline void store_floats(float* to, const f32* x, int vectors) {
    for (int i = 0; i < vectors; i++) store(to + i * LANES, x[i]);
}
inline void store_floats(bf16* to, const f32* x, int vectors) {
    if (vectors == 2) return store(to, pack_neighbours(x[0], x[1]));
    u32 words = pack_neighbours(x[0], x[0]);
    std::memcpy(to, &words, LANES * sizeof *to);
}

// Loads sixteen words of a step: one row of fp32, or two interleaved rows of bf16.
inline u32 words_of(const float* row, int64_t) { return load<u32>(row); }
inline u32 words_of(const bf16* row, int64_t next) {
    typedef uint16_t u16 __attribute__((vector_size(32)));
    return __builtin_convertvector(load<u16>(row), u32) | __builtin_convertvector(load<u16>(row + next), u32) << 16;
}

// Names rows of one sequence.
struct Rows {
    const char* first;
    int64_t row;  // bytes from one to the next

    Rows(const void* x, int64_t row, const int64_t* table, int64_t sequence, int64_t batch = 0)
        : first((const char*)x + sequence * batch), row(row) {
        if (table) first = (const char*)table[3 * sequence], this->row = table[3 * sequence + 1];
    }
    template <class E> const E* at(int64_t i) const { return row_of<E>(first, row, i); }
};

constexpr int ROWS = 32;        // rows of a block
constexpr int64_t CHUNK = 512;  // rows of a task
constexpr int STEP_WORDS = 16;  // words of a tile product
inline int64_t padded(int64_t words) { return (words + STEP_WORDS - 1) / STEP_WORDS * STEP_WORDS; }

// Arranges a basis [r][D] in words, with channels that rotate together side by side: H vectors of the first half, then
// their partners. The last step is zero-padded.
template <class T, int H> Buffer<uint32_t> arrange(const typename T::Element* basis, int64_t rank, int64_t dim) {
    Buffer<uint32_t> words(padded(rank / T::PER_WORD) * dim);
    uint32_t* to = words.data();
    for (int64_t row = 0; row < rank; row += T::PER_WORD)
        for (int64_t c = 0; c < dim / 2; c += H * LANES)
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < H; i++, to += LANES)
                    store(to, words_of(basis + row * dim + side * dim / 2 + c + i * LANES, dim));
    return words;
}

inline void fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char*)from + i, 0, 2);
}

// Multiplies ROWS rows of `words` words with V vectors of every row of b, `stride` words apart.
template <class T, int V>
void products(const uint32_t* const* rows, const uint32_t* b, int64_t stride, int64_t words, f32 (&out)[ROWS][V]) {
    for (int r = 0; r < ROWS; r += TILE_ROWS) {
        f32 tile[TILE_ROWS][V] = {};
        multiply<T, V>(rows + r, b, stride, words, tile);
        std::memcpy(out[r], tile, sizeof tile);
    }
}

// Does the same on tiles; rows and b are zero-padded, and the rows contiguous.
template <int V>
void products(const uint32_t* rows, const uint32_t* b, int64_t stride, int64_t words, f32 (&out)[ROWS][V]) {
    for (int i = 0; i < V; i += 2)
        multiply_tiles<false>(rows, words, b + i * LANES, stride, (float*)&out[0][i], V * LANES, words / STEP_WORDS);
}

template <class T, int H>
void rebuild(const Call& call, const Buffer<uint32_t>& basis, int64_t pair, int64_t first, int64_t last) {
    using E = typename T::Element;
    int64_t half = call.dim / 2, words = call.rank / T::PER_WORD;
    int64_t sequence = pair / call.groups;
    Rows u(call.u, call.u_row, call.u_table, sequence, call.u_batch);
    Rows turns(call.cos, call.cos_row, call.cos_table, sequence), tilts(call.sin, call.sin_row, call.sin_table, sequence);
    Buffer<uint32_t> copies(ROWS * padded(words));
    const bool by_tiles = std::is_same_v<T, BF16Words> && amx_allowed();
    Tiles tiles(by_tiles);
    for (int64_t at = first; at < last; at += ROWS) {
        int n = std::min<int64_t>(ROWS, last - at);
        const uint32_t* rows[ROWS];
        const E *cos[ROWS], *sin[ROWS];
        for (int r = 0; r < ROWS; r++) {
            int64_t position = call.positions[pair * call.count + at + std::min(r, n - 1)];
            rows[r] = u.at<uint32_t>(position);
            cos[r] = turns.at<E>(position);
            sin[r] = tilts.at<E>(position);
            int64_t next = call.positions[pair * call.count + std::min(at + ROWS + r, last - 1)];
            fetch(u.at<E>(next), call.rank * sizeof(E));
            fetch(turns.at<E>(next), half * sizeof(E));
            fetch(tilts.at<E>(next), half * sizeof(E));
            if (by_tiles) std::copy_n(rows[r], words, &copies[r * padded(words)]);
        }
        E* out = (E*)call.out + (pair * call.count + at) * call.dim;
        for (int64_t c = 0; c < half; c += H * LANES) {
            f32 sums[ROWS][2 * H];
            if (by_tiles)
                products<2 * H>(copies.data(), basis.data() + 2 * c, call.dim, padded(words), sums);
            else
                products<T, 2 * H>(rows, basis.data() + 2 * c, call.dim, words, sums);
            for (int r = 0; r < n; r++) {
                f32 low[H], high[H];
                for (int i = 0; i < H; i++) {
                    f32 x = sums[r][i], y = sums[r][H + i];
                    f32 turn = load_floats(cos[r] + c + i * LANES), tilt = load_floats(sin[r] + c + i * LANES);
                    low[i] = x * turn - y * tilt;
                    high[i] = y * turn + x * tilt;
                }
                store_floats(out + r * call.dim + c, low, H);
                store_floats(out + r * call.dim + half + c, high, H);
            }
        }
    }
}

template <class T, int H> void run(const Call& call) {
    int64_t pairs = call.batch * call.groups, chunks = (call.count + CHUNK - 1) / CHUNK;
    each_task(pairs * chunks, pairs * call.count > 64, [&](int64_t task) {
        int64_t pair = task / chunks, first = task % chunks * CHUNK, sequence = pair / call.groups;
        int64_t last = std::min(first + CHUNK, call.counts ? call.counts[sequence] : call.count);
        if (first >= last) return;
        auto pair_basis = (const typename T::Element*)call.basis + pair * call.rank * call.dim;
        if (const int64_t* at = call.basis_table ? call.basis_table + 3 * sequence : nullptr)
            pair_basis = row_of<typename T::Element>((const void*)at[0], at[1], pair % call.groups);
        rebuild<T, H>(call, arrange<T, H>(pair_basis, call.rank, call.dim), pair, first, last);
    });
}

template <class T> void run(const Call& call) {
    if (call.dim % (4 * LANES) == 0)
        run<T, 2>(call);
    else
        run<T, 1>(call);
}

}  // namespace

EXPORT void rebuild_keys(const RebuildKeys& call) { call.is_bf16 ? run<BF16Words>(call) : run<F32Words>(call); }
