// Reads numbers that are written as codes of 2, 4 or 8 bits, or as fp16.
#pragma once
#include "simd.hpp"

// Returns sixteen bytes as words.
inline u32 words_of(const char* bytes) {
#if defined(__AVX512F__)
    return (u32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
#else
    alignas(LINE) uint32_t words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = (uint8_t)bytes[i];
    return load<u32>(words);
#endif
}

// Sixteen codes at a time: a byte holds those of 8 / BITS places, and place p of byte i is channel p * (bytes of a row) +
// i. So the codes of neighbouring bytes are neighbours, whichever their place.
template <int BITS> constexpr int PLACES = 8 / BITS;

template <int BITS> inline f32 codes_at(u32 words, int place) {
    words >>= place * BITS;
    if (place < PLACES<BITS> - 1) words &= (1u << BITS) - 1;
    return __builtin_convertvector((i32)words, f32);
}

// Loads sixteen fp16.
inline f32 load_halves(const void* from) {
#if defined(__AVX512F__)
    return (f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    typedef uint16_t u16 __attribute__((vector_size(32)));
    u32 bits = __builtin_convertvector(load<u16>(from), u32);
    return (f32)((bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16) * 0x1p112f;  // shifts the exponent; finite alone
#endif
}
