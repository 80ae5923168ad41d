// Makes whole numbers of 16 bits of codes, and multiplies them, with the registers of AVX2. A word has four codes at each place
// of its bytes: a register of these becomes two of halves.
#pragma once
#include "coded_scaled.hpp"

namespace {

typedef u32::Register Words;
typedef uint16_t Shorts __attribute__((vector_size(REGISTER)));
constexpr int EACH = u32::EACH;  // words of a register

INLINE i32::Register dot(Words a, Words b) { return (i32::Register)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE f32::Register as_floats(i32::Register x) { return (f32::Register)_mm256_cvtepi32_ps((__m256i)x); }
INLINE Words splat_word(uint32_t x) { return (Words)_mm256_set1_epi32(x); }
INLINE Words splat_two(const void* of) { return (Words)_mm256_set1_epi64x(load<int64_t>(of)); }
INLINE Words repeated_line(const void* of) { return (Words)_mm256_broadcastsi128_si256(load<__m128i>(of)); }

INLINE Words packed(f32 x) {  // rounded to whole numbers of 16 bits, in the order 0-3, 8-11, 4-7, 12-15
    return (Words)_mm256_packs_epi32(_mm256_cvtps_epi32((__m256)x.part[0]), _mm256_cvtps_epi32((__m256)x.part[1]));
}
INLINE Words halves_of(f32 x) { return (Words)_mm256_permute4x64_epi64((__m256i)packed(x), 0xd8); }
INLINE u32 halves_in_order(f32 a, f32 b) { return {{halves_of(a), halves_of(b)}}; }
INLINE u32 halves_by_fours(f32 a, f32 b) {  // of four, 0, 2, 1, 3
    auto turned = [](Words x) { return (Words)_mm256_shufflehi_epi16(_mm256_shufflelo_epi16((__m256i)x, 0xd8), 0xd8); };
    return {{turned(halves_of(a)), turned(halves_of(b))}};
}

template <class Format> constexpr bool HAS_HALVES = !std::is_same_v<Format, Floats>;

// Returns the largest of each of four registers.
INLINE __m128 largest_of_four(const f32::Register* x) {
    __m256 two[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const auto a = (__m256)x[i], b = (__m256)x[i + 2];
        two[i] = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    }
    const __m256 all = _mm256_max_ps(_mm256_unpacklo_ps(two[0], two[1]), _mm256_unpackhi_ps(two[0], two[1]));
    return _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// Makes whole numbers of the codes of a format; what a code stands for is `unit` times its number.
template <class Format> struct Halves {
    static constexpr bool FOUR = std::is_same_v<Format, Floats4>, THREE = std::is_same_v<Format, Levels<3>>;
    static constexpr int BITS = THREE ? 2 : Format::bytes(8), PLACES = 8 / BITS;  // of a byte; third bits stand apart
    static constexpr int GROUP = FOUR ? 16 : 0;  // channels of a row that share a scale (0: all)
    static constexpr bool BY_BYTES = !FOUR && !Format::RANGED;  // whether `add` takes two tokens' bytes in turn
    alignas(16) uint8_t low_bytes[16], high_bytes[16];  // of the number of each code
    float unit = 1;

    explicit Halves(const float* levels) {
        if (Format::RANGED) return;
        constexpr int CODES = 1 << (BITS + THREE);
        float most = 0;
        for (int i = 0; i < CODES; i++) most = std::max(most, std::abs(levels[i]));
        unit = FOUR ? 1.0f / 512 : most / LARGEST_LEVEL;  // multiples of a half become those of 256: their lower bytes are 0
        for (int i = 0; i < 16; i++) {
            const int number = std::lrint(levels[i % CODES] / unit);
            low_bytes[i] = number, high_bytes[i] = number >> 8;
        }
    }

    struct Numbers {
        Words of[2];  // of the lower eight bytes of each 16, and of the upper; of FOUR those of even bytes, and of odd
    };
    // Makes numbers of codes that take a byte each.
    INLINE Numbers numbers(Words codes) const {
        const auto both = [](auto low, auto high) {
            return Numbers{{(Words)_mm256_unpacklo_epi8(low, high), (Words)_mm256_unpackhi_epi8(low, high)}};
        };
        if (Format::RANGED) return both((__m256i)codes, _mm256_setzero_si256());
        const __m256i high = _mm256_shuffle_epi8((__m256i)repeated_line(high_bytes), (__m256i)codes);
        if (FOUR) return {{(Words)((Shorts)high << 8), (Words)high & 0xff00ff00u}};
        return both(_mm256_shuffle_epi8((__m256i)repeated_line(low_bytes), (__m256i)codes), high);
    }
    static INLINE Words at_place(Words bytes, int place) {
        return BITS == 8 ? bytes : bytes >> place * BITS & ((1u << BITS) - 1) * 0x01010101u;
    }
    // Returns the third bits of codes, those of bit `bit` of each byte.
    static INLINE Words thirds(Words bytes, int bit) { return bytes >> bit << 2 & 0x04040404u; }

    // Returns code i of each half, 2^shift_of(i) times as large: it stays at its place where sums of a block fit 32 bits.
    static constexpr int shift_of(int i) { return (i + 1) * BITS <= 12 ? i * BITS : 0; }
    static INLINE Words field(Words halves, int i) {
        const Words moved = (Words)((Shorts)halves >> uint16_t(i * BITS - shift_of(i)));
        return (i + 1) * BITS == 16 ? moved : moved & (((1u << BITS) - 1) << shift_of(i)) * 0x10001u;
    }

    // Prefetches a line: of codes of 8 bits into L2, which has more lines on their way at once than L1.
    static INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, BITS == 8 ? 2 : 3); }

    // Returns the place of channel c among sums, which stand in the order in which `add` makes words.
    static int64_t place_of(int64_t c) {
        const int64_t byte = c % 32, half = byte / 2;
        if (FOUR) return c / GROUP * GROUP + c % 2 * EACH + half % EACH;
        if (!BY_BYTES) return c / 32 * 32 + c % 2 * LANES + half / 4 % 2 * EACH + half % 4 + half / 8 * 4;
        return c / 32 * 32 + byte / 4 % 2 * LANES + byte / 8 % 2 * EACH + byte % 4 + byte / 16 * 4;
    }

    // Multiplies keys with the queries of H heads: to[H][TOKENS]. words[bytes / 4][TOKENS]: the words of each key;
    // scales [groups][TOKENS]. `ahead`: what is prefetched meanwhile.
    template <int H, class Ahead>
    __attribute__((noinline)) void multiply(const uint32_t (*words)[TOKENS], int bytes, const uint32_t (*query)[MOST_DIM / 2],
                  const float (*scales)[TOKENS], float (*to)[TOKENS], Ahead ahead) const {
        if constexpr (FOUR) return multiply_groups<H>(words, bytes, query, scales, to, ahead);
        const int count = THREE ? bytes / 6 : bytes / 4;  // words of codes, without third bits
        const int each = THREE ? count / 2 : count;       // with the same place of third bits
        for (int t = 0; t < TOKENS; t += EACH) {
            i32::Register acc[H][2] = {};
            for (int i = 0; i < PLACES; i++) ahead.fetch();
            for (int first = 0; first < count; first += each)
                for (int w = first; w < first + each; w++) {
                    const Words bytes = load<Words>(words[w] + t);
                    UNROLL for (int place = 0; place < PLACES; place++) {
                        Words codes = at_place(bytes, place);
                        if (THREE) codes |= thirds(load<Words>(words[count + w - first] + t), 2 * place + (first > 0));
                        const Numbers x = numbers(codes);
                        UNROLL for (int h = 0; h < H; h++) {
                            const Words q = splat_two(query[h] + place * count * 2 + 2 * w);
                            UNROLL for (int half = 0; half < 2; half++) acc[h][half] += dot(x.of[half], q);
                            UNROLL for (auto& sum : acc[h]) asm volatile("" : "+x"(sum));  // stay in registers
                        }
                    }
                }
            UNROLL for (int h = 0; h < H; h++) {
                const auto sums = as_floats((i32::Register)_mm256_hadd_epi32((__m256i)acc[h][0], (__m256i)acc[h][1]));
                store(to[h] + t, Format::RANGED ? sums : sums * load<f32::Register>(scales[0] + t));
            }
        }
    }
    // Does so for FOUR: one place after the other, as registers hold the sums of one group for each head.
    template <int H, class Ahead>
    INLINE void multiply_groups(const uint32_t (*words)[TOKENS], int bytes, const uint32_t (*query)[MOST_DIM / 2],
                                const float (*scales)[TOKENS], float (*to)[TOKENS], Ahead ahead) const {
        const int count = bytes / 4;
        for (int t = 0; t < TOKENS; t += EACH) {
            f32::Register sums[H] = {};
            UNROLL for (int place = 0; place < PLACES; place++) {
                ahead.fetch();
                for (int first = 0; first < count; first += GROUP / 4) {
                    i32::Register acc[H] = {};
                    UNROLL for (int w = first; w < first + GROUP / 4; w++) {
                        const Numbers x = numbers(at_place(load<Words>(words[w] + t), place));
                        UNROLL for (int h = 0; h < H; h++) {
                            const uint32_t* of = query[h] + place * count * 2 + 2 * w;
                            UNROLL for (int half = 0; half < 2; half++) acc[h] += dot(x.of[half], splat_word(of[half]));
                            asm volatile("" : "+x"(acc[h]));  // stay in registers
                        }
                    }
                    UNROLL for (int h = 0; h < H; h++)
                        sums[h] += as_floats(acc[h]) * load<f32::Register>(scales[(place * count + first) / (GROUP / 4)] + t);
                }
            }
            UNROLL for (int h = 0; h < H; h++) store(to[h] + t, sums[h]);
        }
    }

    // Loads 32 bytes of two rows: their halves in turn, or their bytes. `part`: which of the two registers.
    static INLINE Words both(const char* a, const char* b, int part) {
        const __m256i x = load<__m256i>(a), y = load<__m256i>(b);
        if (BY_BYTES) return (Words)(part ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y));
        return (Words)(part ? _mm256_unpackhi_epi16(x, y) : _mm256_unpacklo_epi16(x, y));
    }
    // Loads the bytes of the third bits of both: the channels of the upper four words have the bits above those of the lower.
    static INLINE Words both_thirds(const char* a, const char* b, int part) {
        const __m256i x = (__m256i)repeated_line(a), y = (__m256i)repeated_line(b);
        const __m256i words = part ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y);
        return (Words)_mm256_srlv_epi32(words, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    }

    // Turns `count` values of FOUR so that a word has codes of two tokens: to[bytes / 16][TOKENS / 2][EACH], pairs of tokens in
    // the order of `packed`. Behind the last row it repeats.
    static void turn(const char* row, int64_t stride, int count, int bytes, uint32_t* to) {
        const char* next = row;
        UNROLL for (int p = 0; p < TOKENS / 2; p++) {
            row = 2 * p < count ? next : row;
            next = row + (2 * p + 1 < count ? stride : 0);
            uint32_t* words = to + ((p & ~6) + p / 4 % 2 * 2 + p / 2 % 2 * 4) * EACH;
            for (int c = 0; c < bytes; c += 32, words += TOKENS * EACH) {
                const __m256i a = _mm256_permute4x64_epi64(load<__m256i>(row + c), 0xd8);
                const __m256i b = _mm256_permute4x64_epi64(load<__m256i>(next + c), 0xd8);
                store(words, _mm256_unpacklo_epi16(a, b));
                store(words + TOKENS / 2 * EACH, _mm256_unpackhi_epi16(a, b));
            }
            next += stride;
        }
    }
    // Adds values that are turned times the weights of H heads [ranges][TOKENS / 2], in units [ranges]. Sums stand in the order
    // of `place_of`. `ahead`: what is prefetched meanwhile.
    template <int H, class... Ahead>
    __attribute__((noinline)) void add_turned(const uint32_t* turned, int ranges,
             const uint32_t (*weights)[MOST_RANGES * TOKENS / 2], const float (*units)[MOST_RANGES], float* to,
             int64_t to_stride, Ahead... ahead) const {
        for (int first = 0; first < ranges / 2; first++, turned += TOKENS / 2 * EACH)
            UNROLL for (int place = 0; place < PLACES; place++) {
                (ahead.fetch(), ...);
                const int range = place * ranges / 2 + first;
                const uint32_t* weight = weights[0] + range * TOKENS / 2;
                i32::Register sums[H][2] = {};
                for (int p = 0; p < TOKENS / 2; p++) {
                    const Numbers x = numbers(at_place(load<Words>(turned + p * EACH), place));
                    UNROLL for (int h = 0; h < H; h++)
                        UNROLL for (int half = 0; half < 2; half++)
                            sums[h][half] += dot(x.of[half], splat_word(weight[h * MOST_RANGES * TOKENS / 2 + p]));
                }
                UNROLL for (int h = 0; h < H; h++)
                    UNROLL for (int half = 0; half < 2; half++) {
                        float* sum = to + h * to_stride + range * GROUP + half * EACH;
                        store(sum, load<f32::Register>(sum) + as_floats(sums[h][half]) * units[h][range]);
                    }
            }
    }

    // Adds `count` values times the weights of H heads, two tokens at a time: a word has a channel of both. range_of(channel)
    // is the range of 32 channels. A head has weights [ranges][TOKENS / 2], in units [ranges]; its sums stand in the order of
    // `place_of`. `ahead`: what is prefetched meanwhile.
    template <int H, class... Ahead>
    __attribute__((noinline)) void add(const char* row, int64_t stride, int count, int bytes, RangeOf range_of,
             const uint32_t (*weights)[MOST_RANGES * TOKENS / 2], const float (*units)[MOST_RANGES], float* to,
             int64_t to_stride, Ahead... ahead) const {
        if (THREE) bytes = bytes / 3 * 2;
        for (int c = 0; c < bytes; c += 32)
            UNROLL for (int place = 0; place < PLACES; place++) {
                const int channel = place * bytes + c, range = range_of(channel);
                UNROLL for (int part = 0; part < 2; part++) {
                    (ahead.fetch(), ...);
                    i32::Register sums[H][2] = {};
                    const uint32_t* weight = weights[0] + range * TOKENS / 2;
                    auto take = [&](const char* a, const char* b) {
                        const Words codes = both(a + c, b + c, part);
                        Numbers x;
                        if (Format::RANGED)
                            UNROLL for (int half = 0; half < 2; half++) x.of[half] = field(codes, place + half * PLACES);
                        else
                            x = numbers(at_place(codes, place) |
                                        (THREE ? thirds(both_thirds(a + bytes, b + bytes, part), 2 * place) : Words{}));
                        UNROLL for (int h = 0; h < H; h++)
                            UNROLL for (int half = 0; half < 2; half++)
                                sums[h][half] += dot(x.of[half], splat_word(weight[h * MOST_RANGES * TOKENS / 2]));
                        weight++;
                    };
                    const char* a = row;
                    for (int t = 1; t < count; t += 2, a += 2 * stride) take(a, a + stride);
                    if (count % 2) take(a, a);
                    UNROLL for (int h = 0; h < H; h++) {
                        const float unit_of_sums = units[h][range] * (Format::RANGED ? 1 : unit);
                        UNROLL for (int half = 0; half < 2; half++) {
                            float* sum = to + h * to_stride + channel + half * LANES + part * EACH;
                            const float less = Format::RANGED ? 1.0f / (1 << shift_of(place + half * PLACES)) : 1;
                            store(sum, load<f32::Register>(sum) + as_floats(sums[h][half]) * (unit_of_sums * less));
                        }
                    }
                }
            }
    }
};

// Sums over the lanes of eight registers.
INLINE f32::Register sums_of(const f32::Register* x) {
    auto sums = [](auto a, auto b) { return (f32::Register)_mm256_hadd_ps((__m256)a, (__m256)b); };
    const auto low = (__m256)sums(sums(x[0], x[1]), sums(x[2], x[3])), high = (__m256)sums(sums(x[4], x[5]), sums(x[6], x[7]));
    return (f32::Register)(_mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31));
}

// Attends to floats of 8 bits, which become fp32: as whole numbers they would take 18 bits. Their bits are put where a float
// has them, and are then 2^120 times smaller; queries and weights are 2^100 times larger, so that no product is too small.
struct FloatAttention : ScaledAttention {
    static constexpr float LARGE = 0x1p100f;
    Buffer<float> query;  // [MOST_HEADS][width], the largest of a head LARGE
    float units[MOST_HEADS] = {};
    alignas(LINE) float weights[MOST_HEADS][TOKENS] = {};

    FloatAttention(const CodedAttention& in, int64_t sequence, int64_t group, int64_t head, int heads)
        : ScaledAttention(in, sequence, group, head, heads, false), query(MOST_HEADS * width) {
        for (int h = 0; h < heads; h++) {
            float top = 0;
            for (int c = 0; c < dim; c++) top = std::max(top, std::abs(q[h * width + c]));
            units[h] = std::max(top, 0x1p-20f) * (0x1p120f / LARGE);
            for (int c = 0; c < dim; c++) query[h * width + c] = q[h * width + c] * (0x1p120f / units[h]);
        }
    }

    static INLINE f32::Register numbers(const char* codes) {  // of eight
        const auto wide = (Words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)codes));
        return (f32::Register)(wide << 20 & 0x87f00000u);
    }

    void lay_out(const float*) override {}

    void multiply_keys(int64_t first, int count) override {
        by_four(heads, [&](int h, auto n) {
            constexpr int H = n;
            for (int t = 0; t < count; t += 2) {
                const char *a = at.k[first + t], *b = at.k[first + std::min(t + 1, count - 1)];
                for (int c = 0; h == 0 && c < dim; c += LINE) {
                    __builtin_prefetch(a + TOKENS * at.k.row + c, 0, 2);
                    __builtin_prefetch(b + TOKENS * at.k.row + c, 0, 2);
                }
                f32::Register acc[8] = {};  // of two tokens of each head
                for (int c = 0; c < dim; c += EACH) {
                    const auto x = numbers(a + c), y = numbers(b + c);
                    UNROLL for (int i = 0; i < H; i++) {
                        const auto of_query = load<f32::Register>(&query[(h + i) * width + c]);
                        acc[2 * i] += of_query * x, acc[2 * i + 1] += of_query * y;
                    }
                }
                alignas(LINE) float sums[8];
                store(sums, sums_of(acc));
                for (int i = 0; i < H; i++) std::memcpy(logits[h + i] + t, sums + 2 * i, 2 * sizeof(float));
            }
        });
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < TOKENS; t += LANES)
                store(logits[h] + t, load<f32>(logits[h] + t) * load<f32>(scales[0] + t) * units[h]);
    }

    void add_values(int64_t first, int count) override {
        weigh_range(0, [&](int h, f32 a, f32 b) { store(weights[h], a * LARGE), store(weights[h] + LANES, b * LARGE); });
        by_four(heads, [&](int h, auto n) {
            constexpr int H = n;
            for (int c = 0; c < dim; c += 2 * EACH) {
                f32::Register acc[H][2] = {};
                for (int t = 0; t < count; t++) {
                    const char* row = at.v[first + t] + c;
                    if (h == 0 && c % LINE == 0) __builtin_prefetch(row + TOKENS * at.v.row, 0, 2);
                    const auto x = numbers(row), y = numbers(row + EACH);
                    UNROLL for (int i = 0; i < H; i++) {
                        const float weight = weights[h + i][t];
                        acc[i][0] += x * weight, acc[i][1] += y * weight;
                    }
                }
                for (int i = 0; i < H; i++)
                    for (int half = 0; half < 2; half++) {
                        float* sum = states[h + i].acc + c + half * EACH;
                        store(sum, load<f32::Register>(sum) + acc[i][half] * (0x1p120f / LARGE));
                    }
            }
        });
    }

    void put_sums(int head, float* to) const override {
        put_each(to, [&](int c) { return states[head].acc[c]; });
    }
};

}  // namespace
