// Defines vectors of 64 bytes. With AVX-512 each is one register, by the compiler's vector extension. For other processors it
// is a row of registers: compilers split wider vectors of the extension into many steps through memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

constexpr int LANES = 16;  // numbers of a vector
constexpr int LINE = 64;   // bytes of a vector and a cache line
#define UNROLL _Pragma("GCC unroll 16")
#if defined(__AVX512F__)
#define INLINE inline
#define WITHOUT_CALLS
#else  // a call would pass vectors in memory
#define INLINE inline __attribute__((always_inline))
#define WITHOUT_CALLS __attribute__((flatten))
#endif

typedef uint16_t Half __attribute__((vector_size(32)));

#if defined(__AVX512F__)

constexpr int HELD = 32;  // vectors that a processor's registers hold
typedef float f32 __attribute__((vector_size(LINE)));
typedef int32_t i32 __attribute__((vector_size(LINE)));
typedef uint32_t u32 __attribute__((vector_size(LINE)));
typedef uint8_t u8s __attribute__((vector_size(LINE)));

// Returns the lanes of a and b that I names; those of b come after those of a.
template <int... I, class V> INLINE V shuffle(V a, V b) { return __builtin_shufflevector(a, b, I...); }
template <class V> INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> INLINE void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }
INLINE void keep(u32& x) {  // by way of a local: an element of an array would be written to memory as well
    u32 once = x;
    asm("" : "+v"(once));
    x = once;
}
template <class To, class V> INLINE To convert(V x) { return __builtin_convertvector(x, To); }
template <class M, class V> INLINE V select(M mask, V a, V b) { return mask ? a : b; }

#else

#if defined(__AVX2__)
constexpr int REGISTER = 32;  // bytes
#else
constexpr int REGISTER = 16;
#endif
constexpr int HELD = 16 * REGISTER / LINE;

template <class T> struct Vector {
    typedef T Register __attribute__((vector_size(REGISTER)));
    static constexpr int PARTS = LINE / REGISTER, EACH = REGISTER / sizeof(T);
    using Mask = Vector<std::conditional_t<sizeof(T) == 1, int8_t, int32_t>>;  // all bits of a lane, or none
    Register part[PARTS];

    T operator[](int i) const { return part[i / EACH][i % EACH]; }
    T& operator[](int i) { return ((T*)part)[i]; }
    template <class U> INLINE explicit operator Vector<U>() const {  // the same bits
        Vector<U> to;
        UNROLL for (int i = 0; i < PARTS; i++) to.part[i] = (typename Vector<U>::Register)part[i];
        return to;
    }
};
typedef Vector<float> f32;
typedef Vector<int32_t> i32;
typedef Vector<uint32_t> u32;
typedef Vector<uint8_t> u8s;

template <class V> constexpr bool IS_ROW = false;
template <class T> constexpr bool IS_ROW<Vector<T>> = true;

// Register by register: compilers copy 64 bytes at once by way of smaller registers.
template <class V> INLINE V load(const void* from) {
    V v;
    if constexpr (IS_ROW<V>)
        UNROLL for (int i = 0; i < V::PARTS; i++) std::memcpy(&v.part[i], (const char*)from + i * REGISTER, REGISTER);
    else
        std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> INLINE void store(void* to, const V& v) {
    if constexpr (IS_ROW<V>)
        UNROLL for (int i = 0; i < V::PARTS; i++) std::memcpy((char*)to + i * REGISTER, &v.part[i], REGISTER);
    else
        std::memcpy(to, &v, sizeof v);
}

// Holds x in registers: compilers would read it from memory again for each use.
INLINE void keep([[maybe_unused]] u32& x) {
#if defined(__x86_64__)
    UNROLL for (auto& part : x.part) asm("" : "+x"(part));
#endif
}

template <class T> using Same = Vector<T>;
template <class T> using Mask = typename Vector<T>::Mask;
template <class T> using Number = std::common_type_t<T>;  // from which no T is deduced

// Defines an operator for two vectors, or a vector and a number.
#define OPERATOR(op, Result)                                                                        \
    template <class T> INLINE Result<T> operator op(const Vector<T>& a, const Vector<T>& b) {       \
        Result<T> to;                                                                               \
        UNROLL for (int i = 0; i < Vector<T>::PARTS; i++) to.part[i] = a.part[i] op b.part[i];      \
        return to;                                                                                  \
    }                                                                                               \
    template <class T> INLINE Result<T> operator op(const Vector<T>& a, Number<T> b) {              \
        Result<T> to;                                                                               \
        UNROLL for (int i = 0; i < Vector<T>::PARTS; i++) to.part[i] = a.part[i] op b;              \
        return to;                                                                                  \
    }                                                                                               \
    template <class T> INLINE Result<T> operator op(Number<T> a, const Vector<T>& b) {              \
        Result<T> to;                                                                               \
        UNROLL for (int i = 0; i < Vector<T>::PARTS; i++) to.part[i] = a op b.part[i];              \
        return to;                                                                                  \
    }
#define ARITHMETIC(op)                                                                              \
    OPERATOR(op, Same)                                                                              \
    template <class T, class U> INLINE Vector<T>& operator op##=(Vector<T>& a, const U& b) { return a = a op b; }

ARITHMETIC(+)
ARITHMETIC(-)
ARITHMETIC(*)
ARITHMETIC(/)
ARITHMETIC(&)
ARITHMETIC(|)
ARITHMETIC(^)
ARITHMETIC(<<)
ARITHMETIC(>>)
OPERATOR(>, Mask)
OPERATOR(>=, Mask)
OPERATOR(<, Mask)
OPERATOR(==, Mask)
OPERATOR(!=, Mask)
template <class T> INLINE Vector<T> operator-(const Vector<T>& a) { return T(0) - a; }

template <class T> INLINE Vector<T> select(const Mask<T>& mask, const Vector<T>& a, const Vector<T>& b) {
    Vector<T> to;
    UNROLL for (int i = 0; i < Vector<T>::PARTS; i++) to.part[i] = mask.part[i] ? a.part[i] : b.part[i];
    return to;
}

// Returns a register whose lanes come from two of those of a and b.
template <int PART, int... I, class T, size_t... LANE>
INLINE typename Vector<T>::Register shuffle_part(const Vector<T>& a, const Vector<T>& b, std::index_sequence<LANE...>) {
    constexpr int EACH = Vector<T>::EACH, PARTS = Vector<T>::PARTS, all[] = {I...};
    constexpr int first = std::min({all[PART * EACH + LANE]...}) / EACH;
    constexpr int last = std::max({all[PART * EACH + LANE]...}) / EACH;
    static_assert(((all[PART * EACH + LANE] / EACH == first || all[PART * EACH + LANE] / EACH == last) && ...));
    const auto x = first < PARTS ? a.part[first % PARTS] : b.part[first % PARTS];
    const auto y = last < PARTS ? a.part[last % PARTS] : b.part[last % PARTS];
    return __builtin_shufflevector(
        x, y, (all[PART * EACH + LANE] % EACH + (all[PART * EACH + LANE] / EACH == first ? 0 : EACH))...);
}
template <int... I, class T, size_t... PART>
INLINE Vector<T> shuffle_parts(const Vector<T>& a, const Vector<T>& b, std::index_sequence<PART...>) {
    return {{shuffle_part<PART, I...>(a, b, std::make_index_sequence<Vector<T>::EACH>())...}};
}
template <int... I, class T> INLINE Vector<T> shuffle(const Vector<T>& a, const Vector<T>& b) {
    return shuffle_parts<I...>(a, b, std::make_index_sequence<Vector<T>::PARTS>());
}

// Converts number by number, in a loop that compilers turn into the processor's conversions.
template <class To, class From> INLINE To convert(const From& x) {
    std::decay_t<decltype(std::declval<const From&>()[0])> from[LANES];
    std::decay_t<decltype(std::declval<const To&>()[0])> to[LANES];
    store(from, x);
    for (int i = 0; i < LANES; i++) to[i] = from[i];
    return load<To>(to);
}
#endif

// Returns every second lane of a, then of b.
template <class V> INLINE V evens(V a, V b) {
    return shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
}
template <class V> INLINE V odds(V a, V b) {
    return shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
}
