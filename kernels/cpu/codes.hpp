// Turns rows of codes back into numbers: integers of 2, 4 or 8 bits, floats of 8 and 4 bits, and numbers of levels.
//
// A row is first spread to one byte for each code, as bytes are shifted fastest, and then sixteen bytes at a time become
// floats and take their scale. Both happen in memory that stays in L1.
#pragma once
#include "tiles.hpp"

constexpr int MOST_DIM = 256, MOST_RANGES = 16;
enum Kind : int64_t { INTEGERS, FLOATS, LEVELS, FLOATS4 };

typedef uint8_t sixteen_bytes __attribute__((vector_size(16)));

// Converts sixteen numbers of fp16.
INLINE f32 from_halves(Half halves) {
#if defined(__AVX512F__)
    return (f32)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256i all = (__m256i)halves;
    return {{(f32::Register)_mm256_cvtph_ps(_mm256_castsi256_si128(all)),
             (f32::Register)_mm256_cvtph_ps(_mm256_extracti128_si256(all, 1))}};
#else
    u32 bits = convert<u32>(halves), size = bits & 0x7fffu;
    // The exponent's bias differs by 112, and infinities keep the largest exponent; small numbers are multiples of 2^-24.
    u32 normal = (size << 13) + ((u32)(size >= 0x7c00u) & (112u << 23)) + (112u << 23);
    f32 small = convert<f32>((i32)size) * 0x1p-24f;
    u32 magnitude = select(size < 0x400u, (u32)small, normal);
    return (f32)(magnitude | (bits & 0x8000u) << 16);
#endif
}

// Converts `count` numbers of fp16, and leaves zeros behind them, up to a multiple of LANES.
inline void widen_halves(const void* from, int count, float* to) {
    int i = 0;
    do {
        Half halves = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        uint16_t mask = count - i < LANES ? (1u << (count - i)) - 1 : 0xffffu;
        halves = (Half)_mm256_maskz_loadu_epi16(mask, (const char*)from + 2 * i);
#else
        if (count - i >= LANES)
            halves = load<Half>((const char*)from + 2 * i);  // without a call
        else
            std::memcpy(&halves, (const char*)from + 2 * i, 2 * (count - i));
#endif
        store(to + i, from_halves(halves));
    } while ((i += LANES) < count);
}

// Writes codes of BITS each, one to a byte: those of all lowest bits come first. `bytes` is the length of the packed row; up
// to 64 bytes behind the codes are written too.
template <int BITS> inline void spread(const char* row, int bytes, uint8_t* codes) {
    // Place by place: what the last store of one writes too far, the first of the next overwrites.
    UNROLL for (int place = 0; place < 8 / BITS; place++)
        for (int i = 0; i < bytes; i += LINE) {
            u8s part = bytes - i < LINE ? load_part<u8s>(row + i, bytes - i) : load<u8s>(row + i);
            store(codes + place * bytes + i, part >> uint8_t(place * BITS) & uint8_t((1 << BITS) - 1));
        }
}

// Repeats a row of 8, 16 or 32 bytes up to a vector.
template <int BYTES> INLINE u8s repeated(const char* row) {
#if defined(__AVX512F__)
    if constexpr (BYTES == 8) return (u8s)_mm512_set1_epi64(load<int64_t>(row));
    if constexpr (BYTES == 16) return (u8s)_mm512_broadcast_i32x4(load<__m128i>(row));
    return (u8s)_mm512_broadcast_i64x4(load<__m256i>(row));
#else
    alignas(LINE) char all[LINE];
    for (int i = 0; i < LINE; i += BYTES) std::memcpy(all + i, row, BYTES);
    return load<u8s>(all);
#endif
}

// Writes codes of one bit, times `value`, or adds them to codes that are there. A byte of the row has eight, of channels that
// are BYTES apart, so a vector of channels is a vector of bytes that repeat, each with its own bit.
template <int BYTES, bool ADD> inline void spread_bits(const char* row, uint8_t* codes, uint8_t value) {
    struct Bits {
        alignas(LINE) uint8_t of[LINE] = {};
        constexpr Bits() {
            for (int i = 0; i < LINE; i++) of[i] = 1 << i / BYTES;
        }
    };
    static constexpr Bits bits;
    const u8s all = repeated<BYTES>(row);
    UNROLL for (int c = 0; c < 8 * BYTES; c += LINE) {
        u8s set = (u8s)((all >> uint8_t(c / BYTES) & load<u8s>(bits.of)) != 0) & value;
        store(codes + c, ADD ? load<u8s>(codes + c) | set : set);
    }
}
template <bool ADD> inline void spread_bits(const char* row, int bytes, uint8_t* codes, uint8_t value) {
    switch (bytes) {
        case 8: return spread_bits<8, ADD>(row, codes, value);
        case 16: return spread_bits<16, ADD>(row, codes, value);
        case 32: return spread_bits<32, ADD>(row, codes, value);
    }
    for (int c = 0; c < 8 * bytes; c++) {
        uint8_t code = row[c % bytes] >> c / bytes & 1 ? value : 0;
        codes[c] = ADD ? codes[c] | code : code;
    }
}

template <int BITS> inline void spread_codes(const char* row, int dim, uint8_t* codes) {
    if constexpr (BITS == 1)
        spread_bits<false>(row, dim / 8, codes, 1);
    else
        spread<BITS>(row, dim * BITS / 8, codes);
}

// Loads sixteen codes as words. (Compilers take many steps for what is one instruction.)
INLINE i32 words_of(const uint8_t* codes) {
#if defined(__AVX512F__)
    return (i32)_mm512_cvtepu8_epi32(load<__m128i>(codes));
#else
    return (i32)convert<u32>(__builtin_convertvector(load<sixteen_bytes>(codes), Half));
#endif
}

// These say how a code of a format becomes a number, and how a row of `dim` codes is spread. RANGED: its numbers lie in
// ranges, each with a least number and a step; else a row has one scale.
template <int BITS> struct Integers {
    static constexpr bool RANGED = true;
    static constexpr int bytes(int dim) { return dim * BITS / 8; }
    static const uint8_t* spread_row(const char* row, int dim, uint8_t* codes) {
        if constexpr (BITS == 8) return (const uint8_t*)row;
        spread_codes<BITS>(row, dim, codes);
        return codes;
    }
    struct Table {
        explicit Table(const float*) {}
        f32 operator()(const uint8_t* codes) const { return convert<f32>(words_of(codes)); }
    };
};

struct Floats {  // a sign, four bits of exponent, three of mantissa: the upper bits of an fp16 that is 2^8 times smaller
    static constexpr bool RANGED = false;
    static constexpr int bytes(int dim) { return dim; }
    static const uint8_t* spread_row(const char* row, int, uint8_t*) { return (const uint8_t*)row; }
    struct Table {
        explicit Table(const float*) {}
        f32 operator()(const uint8_t* codes) const {
#if defined(__AVX512F__)
            return numbers((Half)_mm256_cvtepu8_epi16(load<__m128i>(codes)));
#else
            return numbers(__builtin_convertvector(load<sixteen_bytes>(codes), Half));
#endif
        }
        static f32 numbers(Half codes) {
            return from_halves((codes & uint16_t{0x80}) << uint16_t{8} | (codes & uint16_t{0x7f}) << uint16_t{7}) * 256.0f;
        }
    };
};

template <int BITS> struct Levels {
    static constexpr bool RANGED = false;
    static constexpr int bytes(int dim) { return dim * BITS / 8; }
    static const uint8_t* spread_row(const char* row, int dim, uint8_t* codes) {
        if constexpr (BITS == 3) {  // all the lower two bits, and behind them all the third ones
            spread<2>(row, dim / 4, codes);
            spread_bits<true>(row + dim / 4, dim / 8, codes, 4);
        } else
            spread_codes<BITS>(row, dim, codes);
        return codes;
    }
    struct Table {
        f32 levels = {};
        explicit Table(const float* from) { std::memcpy(&levels, from, sizeof(float) << BITS); }
        f32 operator()(const uint8_t* codes) const {
            i32 places = words_of(codes);
#if defined(__AVX512F__)
            return (f32)_mm512_permutexvar_ps((__m512i)places, (__m512)levels);
#elif defined(__AVX2__)
            f32 numbers;
            UNROLL for (int i = 0; i < 2; i++) {
                auto of = [&](int half) { return _mm256_permutevar8x32_ps((__m256)levels.part[half], (__m256i)places.part[i]); };
                const __m256 upper = (__m256)(places.part[i] << 28);  // whether the highest of four bits is set
                numbers.part[i] = (f32::Register)(BITS < 4 ? of(0) : _mm256_blendv_ps(of(0), of(1), upper));
            }
            return numbers;
#else
            f32 numbers;
            for (int i = 0; i < LANES; i++) numbers[i] = levels[places[i]];
            return numbers;
#endif
        }
    };
};

struct Floats4 : Levels<4> {};  // levels whose scales are those of sixteen channels and of a block of tokens

// Scale the sixteen numbers from channel c on. Each is what differs between formats: a range of each channel, a range of
// neighbouring channels, or one scale for all.
struct OfChannels {
    const float *least, *step;
    f32 operator()(f32 x, int c) const { return x * load<f32>(step + c) + load<f32>(least + c); }
};
struct OfRanges {
    const float *least, *step;
    const uint8_t* range;  // of each sixteen channels
    f32 operator()(f32 x, int c) const { return x * step[range[c / LANES]] + least[range[c / LANES]]; }
};
struct OfRow {
    float scale;
    f32 operator()(f32 x, int) const { return x * scale; }
};

// Decodes a row of `dim` codes, a multiple of LANES.
template <class Format, class Element, class Scale>
inline void decode_row(const char* row, int dim, const typename Format::Table& table, const Scale& scale, Element* out) {
    alignas(LINE) uint8_t spread[MOST_DIM + LINE];
    const uint8_t* codes = Format::spread_row(row, dim, spread);
    int c = 0;
    for (; c + 2 * LANES <= dim; c += 2 * LANES)
        narrow(out + c, scale(table(codes + c), c), scale(table(codes + c + LANES), c + LANES));
    if (c < dim) narrow(out + c, scale(table(codes + c), c));
}
