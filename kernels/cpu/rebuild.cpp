// Rebuilds keys from their low-rank factors and rotates them before they leave the registers (ShadowKV); in bf16 they
// are multiplied on AMX tiles where there are any.
#include "amx.hpp"
#include "calls.hpp"

namespace {

using Call = RebuildKeys;

// Loads sixteen words of a step: one row in fp32, or two interleaved rows of bf16.
template <class E> u32 words_of(F32, const E* row, int64_t) { return (u32)widen(row); }
inline u32 words_of(BF16, const bf16* row, int64_t next) {
    return convert<u32>(load<Half>(row)) | convert<u32>(load<Half>(row + next)) << 16;
}

// Names rows of one sequence: by a stride, or by a table whose second column holds the stride.
struct Rows {
    const char* first;
    int64_t row;  // bytes from one to the next

    Rows(const void* x, int64_t row, const int64_t* table, int64_t sequence, int64_t batch = 0)
        : first((const char*)x + sequence * batch), row(row) {
        if (table) first = (const char*)table[3 * sequence], this->row = table[3 * sequence + 1];
    }
    template <class E> const E* at(int64_t i) const { return (const E*)(first + i * row); }
};

// Whether registers are so few that one vector of every row of a basis is multiplied after the other: as panels of their own
// these stay in L1.
template <class T> constexpr bool PANELS = WIDENS && std::is_same_v<T, F32>;
template <class T> constexpr int ROWS = PANELS<T> ? 24 : 32;  // rows of a block
constexpr int64_t TASK = 512;  // rows of a task, about

// Returns the words of `rank` channels, filled up to whole tiles.
template <class T> int64_t whole_tiles(int64_t rank) { return (rank / T::PER_WORD + LANES - 1) / LANES * LANES; }

// Arranges a basis [r][D] in words, with channels that rotate together side by side: H vectors of the first half, then
// their partners; each vector of all rows may be a panel of its own. Zeros fill it up to whole tiles.
template <class T, int H, class E> Buffer<uint32_t> arrange(const E* basis, int64_t rank, int64_t dim) {
    const int64_t rows = whole_tiles<T>(rank);
    Buffer<uint32_t> words(rows * dim);
    for (int64_t row = 0; row < rank; row += T::PER_WORD) {
        uint32_t* to = words.data() + row / T::PER_WORD * (PANELS<T> ? LANES : dim);
        for (int64_t c = 0; c < dim / 2; c += H * LANES)
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < H; i++, to += PANELS<T> ? rows * LANES : LANES)
                    store(to, words_of(T{}, basis + row * dim + side * dim / 2 + c + i * LANES, dim));
    }
    return words;
}

inline void fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char*)from + i, 0, 2);
    asm volatile("");  // an effect: gcc 12 leaves out calls of what only prefetches
}

// Multiplies ROWS rows of `words` words with V vectors of every row of b, `stride` words apart.
template <class T, int V>
void products(const uint32_t* const* rows, const uint32_t* b, int64_t stride, int64_t words, f32 (&out)[ROWS<T>][V]) {
    for (int r = 0; r < ROWS<T>; r += TILE_ROWS) {
        f32 tile[TILE_ROWS][V] = {};
        multiply<T, V>(rows + r, b, stride, words, tile);
        std::memcpy(out[r], tile, sizeof tile);
    }
}

// The same with V panels, `stride` words apart: six rows with one vector fill the registers.
template <int V>
void products_of_panels(const uint32_t* const* rows, const uint32_t* b, int64_t stride, int64_t words, f32 (&out)[ROWS<F32>][V]) {
    constexpr int AT_ONCE = 6;
    for (int i = 0; i < V; i++)
        for (int first = 0; first < ROWS<F32>; first += AT_ONCE) {
            f32 sums[AT_ONCE] = {};
            for (int64_t w = 0; w < words; w++) {
                u32 panel = load<u32>(b + i * stride + w * LANES);
                keep(panel);
                UNROLL for (int r = 0; r < AT_ONCE; r++) sums[r] = F32::dot(sums[r], splat(rows[first + r][w]), panel);
            }
            UNROLL for (int r = 0; r < AT_ONCE; r++) out[first + r][i] = sums[r];
        }
}

// The same on tiles, after the rows are copied side by side into `together`, whose words beyond a row are zero.
template <int V>
void products_on_tiles(const uint32_t* together, const uint32_t* b, int64_t stride, int64_t words, f32 (&out)[ROWS<BF16>][V]) {
    for (int n = 0; n < V * LANES; n += 2 * LANES)
        multiply_tiles<false>(together, words, b + n, stride, (float*)out + n, V * LANES, words / LANES);
}

// E: the type of all numbers, which are multiplied as words of T.
template <class T, int H, class E>
void rebuild(const Call& call, const Buffer<uint32_t>& basis, int64_t pair, int64_t first, int64_t last) {
    constexpr int ROWS = ::ROWS<T>;
    constexpr bool WIDENED = !std::is_same_v<typename T::Element, E>;
    std::vector<int64_t> positions, places;  // of the rows, and where they go
    for (int64_t i = pair * call.count + first; i < pair * call.count + last; i++)
        for (int64_t t = 0; t < call.size && call.chunks[i] >= 0; t++)
            positions.push_back(call.chunks[i] * call.size + t), places.push_back(i * call.size + t);
    const int64_t count = positions.size();
    int64_t half = call.dim / 2, words = call.rank / T::PER_WORD;
    int64_t sequence = pair / call.groups;
    bool by_tiles = uses_tiles<T>();
    int64_t filled = whole_tiles<T>(call.rank);
    Buffer<uint32_t> together(by_tiles || WIDENED ? ROWS * filled : 0);
    Tiles tiles(by_tiles);
    Rows u(call.u, call.u_row, call.u_table, sequence, call.u_batch);
    Rows turns(call.cos, call.cos_row, call.cos_table, sequence), tilts(call.sin, call.sin_row, call.sin_table, sequence);
    auto ahead = [&](int64_t i) {  // rows are scattered: one is fetched for each that is written
        int64_t next = positions[std::min(i, count - 1)];
        fetch(u.at<E>(next), call.rank * sizeof(E));
        fetch(turns.at<E>(next), half * sizeof(E));
        fetch(tilts.at<E>(next), half * sizeof(E));
    };
    for (int64_t i = 0; i < std::min<int64_t>(ROWS, count); i++) ahead(i);
    for (int64_t at = 0; at < count; at += ROWS) {
        int n = std::min<int64_t>(ROWS, count - at);
        const uint32_t* rows[ROWS];
        const E *cos[ROWS], *sin[ROWS];
        for (int r = 0; r < ROWS; r++) {
            int64_t position = positions[at + std::min(r, n - 1)];
            rows[r] = u.at<uint32_t>(position);
            cos[r] = turns.at<E>(position);
            sin[r] = tilts.at<E>(position);
        }
        for (int r = 0; r < ROWS && by_tiles; r++) std::memcpy(&together[r * filled], rows[r], 4 * words);
        for (int r = 0; r < ROWS && WIDENED; r++) {
            rows[r] = (const uint32_t*)widened((const E*)rows[r], call.rank, (float*)&together[r * filled]);
        }
        for (int64_t c = 0; c < half; c += H * LANES) {
            f32 sums[ROWS][2 * H];
            if constexpr (PANELS<T>)
                products_of_panels<2 * H>(rows, basis.data() + 2 * c * filled, filled * LANES, words, sums);
            else if (by_tiles)
                products_on_tiles<2 * H>(together.data(), basis.data() + 2 * c, call.dim, filled, sums);
            else
                products<T, 2 * H>(rows, basis.data() + 2 * c, call.dim, words, sums);
            for (int r = 0; r < n; r++) {
                if (c == 0) ahead(at + ROWS + r);
                f32 low[H], high[H];
                for (int i = 0; i < H; i++) {
                    f32 x = sums[r][i], y = sums[r][H + i];
                    f32 turn = widen(cos[r] + c + i * LANES), tilt = widen(sin[r] + c + i * LANES);
                    low[i] = x * turn - y * tilt;
                    high[i] = y * turn + x * tilt;
                }
                E* to = (E*)call.out + places[at + r] * call.dim + c;
                if (H == 2) {
                    narrow(to, low[0], low[H - 1]), narrow(to + half, high[0], high[H - 1]);
                } else {
                    narrow(to, low[0]), narrow(to + half, high[0]);
                }
            }
        }
    }
}

template <class T, int H, class E> void run(const Call& call) {
    int64_t pairs = call.batch * call.groups, each = (TASK + call.size - 1) / call.size;
    int64_t tasks = (call.count + each - 1) / each;
    each_task(pairs * tasks, pairs * call.count * call.size > 64, [&](int64_t task) {
        int64_t pair = task / tasks, first = task % tasks * each, sequence = pair / call.groups;
        int64_t last = std::min(first + each, call.counts ? call.counts[sequence] : call.count);
        if (first >= last) return;
        auto pair_basis = (const E*)call.basis + pair * call.rank * call.dim;
        if (const int64_t* at = call.basis_table ? call.basis_table + 3 * sequence : nullptr)
            pair_basis = (const E*)(at[0] + pair % call.groups * at[1]);
        rebuild<T, H, E>(call, arrange<T, H>(pair_basis, call.rank, call.dim), pair, first, last);
    });
}

template <class T, class E> void run(const Call& call) {
    if (call.dim % (4 * LANES) == 0)
        run<T, 2, E>(call);
    else
        run<T, 1, E>(call);
}

void run_bf16(const Call& call) {
    if constexpr (WIDENS)
        if (!uses_tiles<BF16>()) return run<F32, bf16>(call);
    run<BF16, bf16>(call);
}

}  // namespace

EXPORT void rebuild_keys(const RebuildKeys& call) { call.is_bf16 ? run_bf16(call) : run<F32, float>(call); }
EXPORT int64_t is_on_tiles() { return has_tiles(); }
