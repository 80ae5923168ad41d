// Products of a group's queries with every row of an index.
#include "rows.hpp"

namespace {

struct Rows {  // strides in bytes
    const char* x;
    int64_t batch, groups, heads, count, row_bytes, x_batch, x_group, x_row;
};

// Every query of a group with every row of x [B G S C].
template <class T, int L, bool PART>
void products(const typename T::Element* q, const Rows& in, float* out) {
    int64_t blocks = (in.count + TOKENS - 1) / TOKENS, tasks = in.batch * in.groups * blocks;
    int rest = in.row_bytes - (L - 1) * LINE;
#pragma omp parallel for schedule(static) if (tasks > 64)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t pair = task / blocks, first = task % blocks * TOKENS;
        const char* base = in.x + pair / in.groups * in.x_batch + pair % in.groups * in.x_group;
        const char *rows[TOKENS], *ahead[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            rows[t] = base + std::min(first + t, in.count - 1) * in.x_row;
            ahead[t] = base + std::min(first + t + 2 * TOKENS, in.count - 1) * in.x_row;
        }
        const auto* own = q + pair * in.heads * L * T::WIDTH;
        float* to = out + pair * in.heads * in.count + first;
        if (first + TOKENS <= in.count) {
            block_logits<T, L, PART>(own, rows, ahead, in.heads, 1.0f, to, in.count, rest);
        } else {
            Buffer<float> last(in.heads * TOKENS);
            block_logits<T, L, PART>(own, rows, ahead, in.heads, 1.0f, last.data(), TOKENS, rest);
            for (int64_t h = 0; h < in.heads; h++)
                std::copy_n(&last[h * TOKENS], in.count - first, to + h * in.count);
        }
    }
}

template <class T, int L> void products_of(const void* q, const Rows& in, float* out) {
    auto typed = (const typename T::Element*)q;
    in.row_bytes % LINE ? products<T, L, true>(typed, in, out) : products<T, L, false>(typed, in, out);
}

template <class T> void products_of(const void* q, const Rows& in, float* out) {
    switch ((in.row_bytes + LINE - 1) / LINE) {
        case 1: return products_of<T, 1>(q, in, out);
        case 2: return products_of<T, 2>(q, in, out);
        case 3: return products_of<T, 3>(q, in, out);
        case 4: return products_of<T, 4>(q, in, out);
        case 6: return products_of<T, 6>(q, in, out);
        case 8: return products_of<T, 8>(q, in, out);
        case 16: return products_of<T, 16>(q, in, out);
    }
}

}  // namespace

// q [B G g C] without gaps, C filled up to whole lines with zeros; numbers as in struct Rows.
extern "C" __attribute__((visibility("default"))) void row_scores(int is_bf16, const void* q, const int64_t* numbers, float* out) {
    Rows in;
    std::memcpy(&in, numbers, sizeof in);
    is_bf16 ? products_of<BF16>(q, in, out) : products_of<F32>(q, in, out);
}
