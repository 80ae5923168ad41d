// Computes a decoder block without its attention, for a prompt. Where shapes or processor do not fit, torch does the
// products, and only the passes between them run here.
#include "products.hpp"

namespace {

inline void narrow(float* to, f32 a, f32 b) { store(to, a), store(to + LANES, b); }
inline void narrow(bf16* to, f32 a, f32 b) { store(to, pack_neighbours(a, b)); }

inline void narrow_apart(float* first, float* second, f32 a, f32 b) { store(first, a), store(second, b); }
inline void narrow_apart(bf16* first, bf16* second, f32 a, f32 b) {
    u32 both = pack_neighbours(a, b);
    std::memcpy(first, &both, LINE / 2);
    std::memcpy(second, (const char*)&both + LINE / 2, LINE / 2);
}

template <class T> void prompt_inputs(const BlockWeights& block, const BlockInputs& in) {
    using E = typename T::Element;
    int64_t width = block.channels, dim = block.head_dim, heads[] = {block.heads, block.kv_heads, block.kv_heads};
    const void* norms[] = {block.q_norm, block.k_norm, nullptr};
    void* to[] = {in.q, in.k, in.v};
    Panels<T> panels(width);
    for (int part = 0; part < 3; part++) panels.add_all((&block.q)[part], heads[part] * dim);
    in_slabs<T, 1>({&panels}, in.batch * in.tokens, [&](int64_t first, int64_t rows, bool by_tiles) {
        static thread_local Buffer<E> normed_room, out_room;
        Rows<E> normed(normed_room, rows, width), out(out_room, rows, panels.count() * WIDE);
        for (int64_t r = 0; r < rows; r++) {
            rms_norm((const E*)in.x + (first + r) * width, (const E*)block.norm, width, block.eps, normed[r], width);
            std::memcpy((E*)in.normed + (first + r) * width, normed[r], width * sizeof(E));
        }
        products<T>(normed, rows, panels, by_tiles, [&](int64_t row, int64_t panel, const float* sums) {
            for (int r = 0; r < 2; r++)
                narrow(out[row + r] + panel * WIDE, load<f32>(sums + r * WIDE), load<f32>(sums + r * WIDE + LANES));
        });
        for (int64_t r = 0; r < rows; r++) {
            int64_t b = (first + r) / in.tokens, t = (first + r) % in.tokens;
            int64_t at = b * angles_apart(in) + t * in.turned;
            const E* x = out[r];
            for (int part = 0; part < 3; part++)
                for (int64_t h = 0; h < heads[part]; h++, x += dim) {
                    E* head = (E*)to[part] + ((b * heads[part] + h) * in.tokens + t) * dim;
                    std::memcpy(head, x, dim * sizeof(E));
                    if (part < 2)
                        finish_head(head, dim, (const E*)norms[part], block.eps, (const E*)in.cos + at,
                                    (const E*)in.sin + at, in.turned);
                }
        }
    });
}

template <class T> void prompt_output(const BlockWeights& block, const BlockOutput& in) {
    using E = typename T::Element;
    int64_t width = block.channels, inner = block.inner, from = block.heads * block.head_dim;
    Panels<T> o(from), gate_up(width), down(inner);
    o.add_all(block.o, width);
    down.add_all(block.down, width);
    for (int64_t row = 0; row < inner; row += LANES) gate_up.add(block.gate, row), gate_up.add(block.up, row);
    in_slabs<T, 3>({&o, &gate_up, &down}, in.rows, [&](int64_t first, int64_t count, bool by_tiles) {
        static thread_local Buffer<E> middle_room, attended_room, normed_room, active_room;
        Rows<E> middle(middle_room, count, width), normed(normed_room, count, width);
        Rows<E> heads(attended_room, count, from), active(active_room, count, inner);
        auto add_to = [&](const E* x, int64_t x_stride, E* y, int64_t y_stride) {
            return [=](int64_t row, int64_t panel, const float* sums) {
                for (int64_t r = row; r < row + 2 && r < count; r++, sums += WIDE) {
                    const E* at = x + r * x_stride + panel * WIDE;
                    f32 a = load<f32>(sums), b = load<f32>(sums + LANES);
                    round_both<E>(a, b);
                    narrow(y + r * y_stride + panel * WIDE, widen(at) + a, widen(at + LANES) + b);
                }
            };
        };
        for (int64_t r = 0; r < count; r++)
            std::memcpy(heads[r], (const E*)in.attended + (first + r) * from, from * sizeof(E));
        const E* x = (const E*)in.x + first * width;
        products<T>(heads, count, o, by_tiles, add_to(x, width, middle[0], middle.stride));
        for (int64_t r = 0; r < count; r++)
            rms_norm(middle[r], (const E*)block.mlp_norm, width, block.eps, normed[r], width);
        products<T>(normed, count, gate_up, by_tiles, [&](int64_t row, int64_t panel, const float* sums) {
            f32 gate[2], up[2];
            for (int r = 0; r < 2; r++) {
                gate[r] = load<f32>(sums + r * WIDE), up[r] = load<f32>(sums + r * WIDE + LANES);
                round_both<E>(gate[r], up[r]);
                gate[r] = silu<E>(gate[r]);
            }
            round_both<E>(gate[0], gate[1]);
            E *first_row = active[row] + panel * LANES, *second_row = first_row + active.stride;
            narrow_apart(first_row, second_row, gate[0] * up[0], gate[1] * up[1]);
        });
        E* y = (E*)in.out + first * width;
        products<T>(active, count, down, by_tiles, add_to(middle[0], middle.stride, y, width));
    });
}

template <class E> void norm_rows(const NormRows& in) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < in.rows; row++)
        rms_norm((const E*)in.x + row * in.width, (const E*)in.weight, in.width, in.eps, (E*)in.out + row * in.width,
                 in.width);
}

template <class E> void turn_rows(const TurnRows& in) {
    const int64_t batch = in.batch, tokens = in.tokens, heads = in.heads, dim = in.dim, turned = in.turned;
    const int64_t per_sequence = in.angles > 1 ? tokens * turned : 0;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++) {
                E* to = (E*)in.out + ((b * heads + h) * tokens + t) * dim;
                std::memcpy(to, (const E*)in.x + ((b * tokens + t) * heads + h) * dim, dim * sizeof(E));
                int64_t at = b * per_sequence + t * turned;
                finish_head(to, dim, (const E*)in.norm, in.eps, (const E*)in.cos + at, (const E*)in.sin + at, turned);
            }
}

template <class E> void gate_rows(const GateRows& in) {
    constexpr int64_t CHUNK = 4096;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < in.count; at += CHUNK)
        gated((const E*)in.gate + at, (const E*)in.up + at, std::min(CHUNK, in.count - at), (E*)in.gate + at);
}

}  // namespace

EXPORT void norm_rows(const NormRows& in) { in.is_bf16 ? norm_rows<bf16>(in) : norm_rows<float>(in); }

EXPORT void turn_rows(const TurnRows& in) { in.is_bf16 ? turn_rows<bf16>(in) : turn_rows<float>(in); }

EXPORT void gate_rows(const GateRows& in) { in.is_bf16 ? gate_rows<bf16>(in) : gate_rows<float>(in); }

EXPORT void prompt_inputs(const BlockWeights& block, const BlockInputs& in) {
    in.is_bf16 ? prompt_inputs<BF16Words>(block, in) : prompt_inputs<F32Words>(block, in);
}

EXPORT void prompt_output(const BlockWeights& block, const BlockOutput& in) {
    in.is_bf16 ? prompt_output<BF16Words>(block, in) : prompt_output<F32Words>(block, in);
}

// Says whether our products suit this processor; without wide vectors, or dpbf16, torch's are faster.
EXPORT int64_t is_fast_in_float32() {
#if defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}
EXPORT int64_t is_fast_in_bfloat16() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}
