// Computes a decoder block without its attention, for one new token: matrix-vector products that read each matrix once.
#include "block.hpp"

namespace {

constexpr int ROWS = 8;  // weight rows at a time

// Multiplies `n` <= ROWS rows, starting at `w`, with x, which is zero-padded past `count`.
template <class T, bool PART>
f32 dots(const typename T::Element* w, int64_t n, int64_t count, const typename T::Element* x) {
    using V = typename T::Vector;
    constexpr int W = T::WIDTH;
    f32 acc[2 * ROWS] = {};
    const typename T::Element* row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = w + std::min<int64_t>(r, n - 1) * count;
    int64_t at = 0, ahead = ROWS * count;
    for (; at + 2 * W <= count; at += 2 * W) {
        V first = load<V>(x + at), second = load<V>(x + at + W);
        UNROLL for (int r = 0; r < ROWS; r++) {
            __builtin_prefetch(row[r] + ahead + at);
            __builtin_prefetch(row[r] + ahead + at + W);
            acc[2 * r] = T::dot(acc[2 * r], load<V>(row[r] + at), first);
            acc[2 * r + 1] = T::dot(acc[2 * r + 1], load<V>(row[r] + at + W), second);
        }
    }
    for (; at < count; at += W) {
        V part = load<V>(x + at);
        int bytes = std::min<int64_t>(LINE, (count - at) * sizeof(*w));
        UNROLL for (int r = 0; r < ROWS; r++)
            acc[2 * r] = T::dot(acc[2 * r], PART ? load_part<V>(row[r] + at, bytes) : load<V>(row[r] + at), part);
    }
    return sums_of(acc);  // adjacent sums belong to one row
}

// Calls emit(row, sequence, product) for this thread's share of the `all` rows. x [batch][padded]
template <class T, class F>
void products(const Weights& by, int64_t all, int64_t count, const typename T::Element* x, int64_t batch, F emit) {
    using E = typename T::Element;
    const E *weight = (const E*)by.weight, *bias = (const E*)by.bias;
    int64_t padded = whole_lines(count, T::WIDTH), blocks = (all + ROWS - 1) / ROWS;
    int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int64_t last = std::min(all, blocks * (thread + 1) / threads * ROWS);
    for (int64_t row = blocks * thread / threads * ROWS; row < last; row += ROWS) {
        int64_t n = std::min<int64_t>(ROWS, last - row);
        for (int64_t b = 0; b < batch; b++) {
            const E* w = weight + row * count;
            f32 sums = count == padded ? dots<T, false>(w, n, count, x + b * padded)
                                       : dots<T, true>(w, n, count, x + b * padded);
            for (int64_t r = 0; r < n; r++)
                emit(row + r, b, sums[2 * r] + sums[2 * r + 1] + (bias ? to_float(bias[row + r]) : 0.0f));
        }
    }
}

template <class T> void attention_inputs(const BlockWeights& block, const BlockInputs& in) {
    using E = typename T::Element;
    int64_t width = block.channels, padded = whole_lines(width, T::WIDTH), dim = block.head_dim;
    int64_t outs[] = {block.heads * dim, block.kv_heads * dim, block.kv_heads * dim};
    const Weights* weights[] = {&block.q, &block.k, &block.v};
    E* to[] = {(E*)in.q, (E*)in.k, (E*)in.v};
    Team team;
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        static thread_local Buffer<E> normed_room;
        E* normed = room(normed_room, in.batch * padded);
        for (int64_t b = 0; b < in.batch; b++) {
            rms_norm((const E*)in.x + b * width, (const E*)block.norm, width, block.eps, normed + b * padded, padded);
            if (omp_get_thread_num() == 0)
                std::memcpy((E*)in.normed + b * width, normed + b * padded, width * sizeof(E));
        }
        for (int part = 0; part < 3; part++)
            products<T>(*weights[part], outs[part], width, normed, in.batch,
                        [&](int64_t row, int64_t b, float y) { put(to[part] + b * outs[part] + row, y); });
#pragma omp barrier
#pragma omp for schedule(static) nowait
        for (int64_t head = 0; head < in.batch * (block.heads + block.kv_heads); head++) {
            bool is_q = head < in.batch * block.heads;
            int64_t at = is_q ? head : head - in.batch * block.heads;
            int64_t b = at / (is_q ? block.heads : block.kv_heads);
            finish_head((is_q ? to[0] : to[1]) + at * dim, dim, (const E*)(is_q ? block.q_norm : block.k_norm),
                        block.eps, (const E*)in.cos + b * angles_apart(in), (const E*)in.sin + b * angles_apart(in),
                        in.turned);
        }
    }
}

template <class T> void block_output(const BlockWeights& block, const BlockOutput& in) {
    using E = typename T::Element;
    const int64_t batch = in.rows;
    int64_t width = block.channels, padded = whole_lines(width, T::WIDTH), inner = block.inner;
    int64_t from = block.heads * block.head_dim, from_padded = whole_lines(from, T::WIDTH);
    int64_t inner_padded = whole_lines(inner, T::WIDTH);
    static thread_local Buffer<E> heads_room, middle_room, inner_room;
    static thread_local Buffer<E> gate_room, up_room;
    E *heads = room(heads_room, batch * from_padded), *middle = room(middle_room, batch * width);
    E* active = room(inner_room, batch * inner_padded);
    E *gate = room(gate_room, batch * inner), *up = room(up_room, batch * inner);
    for (int64_t b = 0; b < batch; b++) {
        std::memcpy(heads + b * from_padded, (const E*)in.attended + b * from, from * sizeof(E));
        std::fill(heads + b * from_padded + from, heads + (b + 1) * from_padded, E(0));
        std::fill(active + b * inner_padded + inner, active + (b + 1) * inner_padded, E(0));
    }
    const E* x = (const E*)in.x;
    Team team;
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        static thread_local Buffer<E> normed_room;
        products<T>(block.o, width, from, heads, batch, [&](int64_t row, int64_t b, float y) {
            put(middle + b * width + row, to_float(x[b * width + row]) + round_to<E>(y));
        });
#pragma omp barrier
        E* normed = room(normed_room, batch * padded);
        for (int64_t b = 0; b < batch; b++)
            rms_norm(middle + b * width, (const E*)block.mlp_norm, width, block.eps, normed + b * padded, padded);
        int64_t first = inner, last = 0;  // the rows of this thread
        products<T>(block.gate, inner, width, normed, batch, [&](int64_t row, int64_t b, float y) {
            put(gate + b * inner + row, y);
            first = std::min(first, row), last = std::max(last, row + 1);
        });
        products<T>(block.up, inner, width, normed, batch,
                    [&](int64_t row, int64_t b, float y) { put(up + b * inner + row, y); });
        for (int64_t b = 0; b < batch && first < last; b++)
            gated(gate + b * inner + first, up + b * inner + first, last - first, active + b * inner_padded + first);
#pragma omp barrier
        products<T>(block.down, width, inner, active, batch, [&](int64_t row, int64_t b, float y) {
            put((E*)in.out + b * width + row, to_float(middle[b * width + row]) + round_to<E>(y));
        });
    }
}

template <class T> void token_logits(const HeadWeights& head, const TokenLogits& in) {
    using E = typename T::Element;
    const int64_t batch = in.batch;
    int64_t padded = whole_lines(head.channels, T::WIDTH);
    Team team;
#pragma omp parallel num_threads(team.threads)
    {
        Member member(team);
        static thread_local Buffer<E> normed_room;
        E* normed = room(normed_room, batch * padded);
        for (int64_t b = 0; b < batch; b++)
            rms_norm((const E*)in.x + b * head.channels, (const E*)head.norm, head.channels, head.eps,
                     normed + b * padded, padded);
        products<T>(head.weights, head.rows, head.channels, normed, batch,
                    [&](int64_t row, int64_t b, float y) { put((E*)in.out + b * head.rows + row, y); });
    }
}

}  // namespace

EXPORT void attention_inputs(const BlockWeights& block, const BlockInputs& in) {
    in.is_bf16 ? attention_inputs<BF16>(block, in) : attention_inputs<F32>(block, in);
}

EXPORT void block_output(const BlockWeights& block, const BlockOutput& in) {
    in.is_bf16 ? block_output<BF16>(block, in) : block_output<F32>(block, in);
}

EXPORT void token_logits(const HeadWeights& head, const TokenLogits& in) {
    in.is_bf16 ? token_logits<BF16>(head, in) : token_logits<F32>(head, in);
}
