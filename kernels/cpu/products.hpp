// Multiplies many rows with matrices. Matrices are packed into panels of 32 outputs once per call; each thread then
// takes a slab of rows through all products, so that intermediate results stay in its cache.
#pragma once
#include <array>

#include "amx.hpp"
#include "calls.hpp"

inline int64_t whole_lines(int64_t count, int64_t width) { return (count + width - 1) / width * width; }

// Returns scratch space that is kept between calls.
template <class E> E* room(Buffer<E>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

constexpr int TALL = 32, WIDE = 32;  // rows and columns of a block
// Vectors of a panel that are multiplied at once, and lie side by side, and rows that they are multiplied with: the
// registers hold all sums.
constexpr int BESIDE = std::max(1, HELD / 16), AT_ONCE = HELD / 2 / BESIDE;
// words that are summed over at once, so that the rows (AVX2: sixteen outputs as well) stay in L1
constexpr int64_t MOST_WORDS = HELD == 8 ? 192 : 512;
constexpr int64_t SLAB_BYTES = 512;  // rows of a slab times bytes of a number

// Points to sixteen outputs of a matrix.
struct Outputs {
    const char* weight;  // [16 in]
    const void* bias;    // [16] or null
};

// Holds matrices [outs in] multiplied with the same rows, side by side in panels [32 / beside][words of in][beside].
// Where they are widened, a word is one number in fp32.
template <class T> struct Panels {
    using E = typename T::Element;
    bool widened = WIDENS && std::is_same_v<T, BF16> && !uses_tiles<T>();
    int64_t in, words, beside = uses_tiles<T>() ? WIDE : BESIDE * LANES;
    std::vector<Outputs> outputs;  // two for each panel
    uint32_t* packed = nullptr;

    explicit Panels(int64_t in) : in(in), words(widened ? in : in / T::PER_WORD) {}
    int64_t count() const { return outputs.size() / 2; }
    int64_t size() const { return count() * words * WIDE; }
    void add(const Weights& by, int64_t row) {
        outputs.push_back({(const char*)((const E*)by.weight + row * in), by.bias ? (const E*)by.bias + row : nullptr});
    }
    void add_all(const Weights& by, int64_t outs) {
        for (int64_t row = 0; row < outs; row += LANES) add(by, row);
    }
    void pack(int64_t panel) {
        for (int half = 0; half < 2; half++) {
            const char* from = outputs[2 * panel + half].weight;
            int64_t column = half * LANES;
            uint32_t* to = packed + panel * words * WIDE + column / beside * beside * words + column % beside;
            for (int64_t w = 0, all = in / T::PER_WORD; w < all; w += LANES) {
                u32 x[LANES];
                UNROLL for (int i = 0; i < LANES; i++) x[i] = load<u32>(from + (i * all + w) * 4);
                transpose(x);
                if (WIDENS && widened)
                    for (int i = 0; i < LANES; i++, to += 2 * beside) store(to, even(x[i])), store(to + beside, odd(x[i]));
                else
                    UNROLL for (int i = 0; i < LANES; i++, to += beside) store(to, x[i]);
            }
        }
    }
};

// Computes c[32][32] = or += a[32][words] times a panel's `words` from b on, of the `all` that it has.
template <class T, bool ADD>
void multiply_block(const uint32_t* a, int64_t stride, const uint32_t* b, int64_t all, int64_t words, float* c,
                    bool by_tiles) {
    if (by_tiles) return multiply_tiles<ADD>(a, stride, b, WIDE, c, WIDE, words / LANES);
    for (int n = 0; n < WIDE; n += BESIDE * LANES)
        in_tiles<AT_ONCE>(TALL, [&](int m, auto rows) {
            multiply_rows<T, ADD, BESIDE, rows>(a + m * stride, stride, b + n * all, BESIDE * LANES, words,
                                                c + m * WIDE + n, WIDE);
        });
}

template <class E> void add_bias(float* c, const Outputs* outputs) {
    for (int half = 0; half < 2; half++)
        if (outputs[half].bias)
            for (float* at = c + half * LANES; at < c + TALL * WIDE; at += WIDE)
                store(at, load<f32>(at) + widen((const E*)outputs[half].bias));
}

// Makes room for `rows` rows of `width`, in whole blocks. Rows are an odd number of cache lines apart: otherwise a
// column would map to a single cache set.
template <class E> struct Rows {
    int64_t stride;
    E* at;
    Rows(Buffer<E>& buffer, int64_t rows, int64_t width)
        : stride((whole_lines(width, LINE / sizeof(E)) * sizeof(E) / LINE | 1) * LINE / sizeof(E)),
          at(room(buffer, whole_lines(rows, TALL) * stride)) {}
    E* operator[](int64_t row) const { return at + row * stride; }
};

// Returns rows of `width` in fp32, in room that is kept between calls.
template <class E> Rows<float> widened(const Rows<E>& rows, int64_t count, int64_t width) {
    static thread_local Buffer<float> wide_room;
    Rows<float> wide(wide_room, count, width);
    for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < width; c += LANES) store(wide[r] + c, widen(rows[r] + c));
    return wide;
}

// Calls emit(row, panel, sums [2][32] of this row and the next) for `rows` rows of a [in], multiplied as words of `As`.
template <class As, class T, class F>
void products_as(const Rows<typename As::Element>& a, int64_t rows, const Panels<T>& by, bool by_tiles, F emit) {
    static thread_local Buffer<float> sums_room;
    float* sums = room(sums_room, whole_lines(rows, TALL) * WIDE);
    int64_t stride = a.stride / As::PER_WORD, parts = (by.words + MOST_WORDS - 1) / MOST_WORDS;
    int64_t part = whole_lines(by.words / parts, LANES);
    for (int64_t panel = 0; panel < by.count(); panel++)
        for (int64_t k = 0; k < by.words; k += part) {
            const uint32_t* b = by.packed + panel * by.words * WIDE + k * by.beside;
            int64_t words = std::min(part, by.words - k);
            for (int64_t m = 0; m < rows; m += TALL) {
                float* c = sums + m * WIDE;
                const uint32_t* from = (const uint32_t*)a[m] + k;
                k ? multiply_block<As, true>(from, stride, b, by.words, words, c, by_tiles)
                  : multiply_block<As, false>(from, stride, b, by.words, words, c, by_tiles);
                if (k + words < by.words) continue;
                add_bias<typename T::Element>(c, &by.outputs[2 * panel]);
                for (int r = 0; r < TALL; r += 2) emit(m + r, panel, c + r * WIDE);
            }
        }
}

template <class T, class F>
void products(const Rows<typename T::Element>& a, int64_t rows, const Panels<T>& by, bool by_tiles, F emit) {
    if (WIDENS && by.widened) return products_as<F32>(widened(a, rows, by.in), rows, by, false, emit);
    products_as<T>(a, rows, by, by_tiles, emit);
}

// Packs all panels, then calls run(first row, rows, whether on tiles) for all rows, in parallel.
template <class T, size_t N, class F> void in_slabs(std::array<Panels<T>*, N> panels, int64_t rows, F run) {
    static thread_local Buffer<uint32_t> packed;
    int64_t size = 0, threads = omp_get_max_threads();
    int64_t most = SLAB_BYTES / (panels[0]->widened ? sizeof(float) : sizeof(typename T::Element));
    for (auto p : panels) size += p->size();
    uint32_t* to = room(packed, size);
    for (auto p : panels) p->packed = to, to += p->size();
    int64_t slabs = whole_lines((rows + most - 1) / most, threads);
    int64_t slab = whole_lines((rows + slabs - 1) / slabs, TALL);
    bool by_tiles = uses_tiles<T>();
#pragma omp parallel num_threads(threads)
    {
        for (auto p : panels) {
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < p->count(); i++) p->pack(i);
        }
#pragma omp barrier
        Tiles tiles(by_tiles);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < rows; first += slab) run(first, std::min(slab, rows - first), by_tiles);
    }
}
