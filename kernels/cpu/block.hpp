// Defines a decoder block and the passes between its matrix products, for decode steps and prompts.
#pragma once
#include "calls.hpp"
#include "rows.hpp"
#include "tiles.hpp"

// Returns the stride of cos and sin between sequences; 0 if all share them.
inline int64_t angles_apart(const BlockInputs& in) { return in.angles > 1 ? in.tokens * in.turned : 0; }

inline int64_t whole_lines(int64_t count, int64_t width) { return (count + width - 1) / width * width; }

// Returns scratch space that is kept between calls.
template <class E> E* room(Buffer<E>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

template <class E> inline float round_to(float x) {
    E y;
    put(&y, x);
    return to_float(y);
}

// Computes y = weight * (x / root mean square), rounded where the model's own norm rounds; zero-padded up to `padded`.
template <class E> void rms_norm(const E* x, const E* weight, int64_t count, double eps, E* y, int64_t padded) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; i++) total += to_float(x[i]) * to_float(x[i]);
    float share = 1 / std::sqrt(total / count + (float)eps);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) put(y + i, to_float(weight[i]) * round_to<E>(to_float(x[i]) * share));
    for (int64_t i = count; i < padded; i++) y[i] = 0;
}

// Norms one head and rotates its first `turned` channels, in place.
template <class E>
void finish_head(E* x, int64_t dim, const E* norm, double eps, const E* cos, const E* sin, int64_t turned) {
    if (norm) rms_norm(x, norm, dim, eps, x, dim);
    int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[i + half]);
        put(x + i, a * to_float(cos[i]) - b * to_float(sin[i]));
        put(x + i + half, b * to_float(cos[i + half]) + a * to_float(sin[i + half]));
    }
}

// These load sixteen floats from either type, and store them back.
inline f32 widen(const float* from) { return load<f32>(from); }
inline f32 widen(const bf16* from) {
    typedef uint16_t Half __attribute__((vector_size(32)));
    return (f32)(__builtin_convertvector(load<Half>(from), u32) << 16);
}
inline void narrow(float* to, f32 x) { store(to, x); }
inline void narrow(bf16* to, f32 x) {
    typedef uint16_t Half __attribute__((vector_size(32)));
    store(to, __builtin_convertvector(rounded(x) >> 16, Half));
}

// Rounds a and b as if they were stored as E and read back.
template <class E> inline void round_both(f32& a, f32& b) {
    if (std::is_same_v<E, float>) return;
    typedef uint16_t Words __attribute__((vector_size(64)));
    typedef uint16_t Half __attribute__((vector_size(32)));
    Words both = (Words)pack_neighbours(a, b);
    Half first = __builtin_shufflevector(both, both, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Half last = __builtin_shufflevector(both, both, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    a = (f32)(__builtin_convertvector(first, u32) << 16), b = (f32)(__builtin_convertvector(last, u32) << 16);
}

// Computes x / (1 + e^-x), as exactly as E needs.
template <class E> inline f32 silu(f32 x) {
#if defined(__AVX512F__)
    if (std::is_same_v<E, bf16>)
        return x * (f32)_mm512_rcp14_ps((__m512)(exp2<3>(x * -(float)M_LOG2E) + 1.0f));
#endif
    return x / (exp2(x * -(float)M_LOG2E) + 1.0f);
}

// Computes silu(gate) * up, rounded in between as in torch; `out` may be `gate`.
template <class E> void gated(const E* gate, const E* up, int64_t count, E* out) {
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t n = std::min<int64_t>(LANES, count - at);
        E part[2][LANES] = {};
        const E *g = gate + at, *u = up + at;
        if (n < LANES) {
            std::memcpy(part[0], g, n * sizeof(E));
            std::memcpy(part[1], u, n * sizeof(E));
            g = part[0], u = part[1];
        }
        f32 x = widen(g);
        E active[LANES], y[LANES];
        narrow(active, silu<E>(x));
        narrow(y, widen(active) * widen(u));
        std::memcpy(out + at, y, n * sizeof(E));
    }
}
