// Attends from one token to segments of keys and values: every row is read once, in place, for all heads of its group.
// Memory is the limit, so the design is about the order and pace of reads. Blocks of rows fit L1; a block's values are
// prefetched while its logits are computed, the next block's keys while the values are summed. (Prefetching both in the
// same phase, or in bursts, reaches half the bandwidth.)
#include "calls.hpp"
#include "attention.hpp"

namespace {

struct Call {
    const PackedSegment* segments;
    int64_t num_segments, batch, groups, heads, dim;  // groups: each reads one choice of rows; heads: of a group
    float scale;                                      // times log2(e)
    bool weighted;                                    // whether any segment has log-weights
};

// Returns how many rows of a segment are there for a sequence.
inline int64_t rows_of(const PackedSegment& segment, int64_t sequence) {
    return segment.live ? std::min(segment.live[sequence], segment.count) : segment.count;
}

// Hands out the rows of one group, segment after segment, in blocks.
struct Rows {
    const Call& call;
    int64_t pair, left, at, row_bytes;  // at: the place in the current segment
    const PackedSegment* segment;

    Rows(const Call& call, int64_t pair, int64_t first, int64_t count, int64_t row_bytes)
        : call(call), pair(pair), left(count), at(first), row_bytes(row_bytes), segment(call.segments) {
        for (; left && at >= there(); segment++) at -= there();
    }

    int64_t there() const { return rows_of(*segment, pair / call.groups); }

    // Chosen rows are scattered, so each costs a page walk and a memory access: they are prefetched a block ahead into
    // L2, which tracks three times as many outstanding lines as L1.
    void fetch(const char* row) const {
        for (int64_t i = 0; i < row_bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
    }

    // Past the end the last row repeats, with weight 0. Rows with a log-weight of minus infinity are left out.
    template <bool WEIGHTED> void fill(Block& block) {
        int count = 0;
        int64_t sequence = pair / call.groups;
        while (count < TOKENS && left) {
            const PackedSegment& s = *segment;
            int64_t size = there(), n = std::min({int64_t{TOKENS - count}, left, size - at});
            int64_t group = pair % call.groups / s.k_share;
            HeadRows k(s.k, s.k_batch, s.k_group, s.k_token, s.k_table, sequence, group);
            HeadRows v(s.v, s.v_batch, s.v_group, s.v_token, s.v_table, sequence, group);
            int64_t list = pair / s.rows_share * s.count + at;
            const int64_t* rows = s.rows + list;
            int n_read = 0;
            for (int i = 0; i < n; i++) {
                if (WEIGHTED) {
                    float added = s.log_weights ? s.log_weights[list + i] : 0;
                    if (added == -INFINITY) continue;
                    block.added[count + n_read] = added * (float)M_LOG2E;
                }
                int64_t row = s.rows ? rows[i] : at + i;
                block.k[count + n_read] = k[row];
                block.v[count + n_read] = v[row];
                if (s.rows) fetch(block.k[count + n_read]), fetch(block.v[count + n_read]);
                n_read++;
            }
            count += n_read, at += n, left -= n;
            if (at == size) segment++, at = 0;
        }
        block.count = count;
        for (int i = std::max(count, 1); i < TOKENS; i++) block.k[i] = block.k[i - 1], block.v[i] = block.v[i - 1];
    }
};

// flatten: two callers would else share functions that are faster inlined
template <class T, bool WEIGHTED, int L>
__attribute__((flatten)) void attend_rows(const Call& call, Rows rows, const typename T::Query* q, State* state) {
    Block blocks[2];
    rows.fill<WEIGHTED>(blocks[0]);
    for (int i = 0; blocks[i].count; i ^= 1) {
        blocks[i ^ 1] = blocks[i];  // nothing follows the last block: prefetch it again
        rows.fill<WEIGHTED>(blocks[i ^ 1]);
        for (int h = 0; h < call.heads; h += HEADS) {
            const int heads = std::min<int>(HEADS, call.heads - h);
            alignas(LINE) float logits[HEADS][TOKENS];
            block_logits<T, L>(q + h * call.dim, blocks[i].k, blocks[i].v, heads, call.scale, logits[0], TOKENS);
            attend_logits<T, L, WEIGHTED>(blocks[i], blocks[i ^ 1].k, logits, state + h, heads);
        }
    }
}

template <class T, bool WEIGHTED>
void attend_rows(const Call& call, Rows rows, const typename T::Query* q, State* state) {
    switch (call.dim / T::WIDTH) {
        case 1: return attend_rows<T, WEIGHTED, 1>(call, rows, q, state);
        case 2: return attend_rows<T, WEIGHTED, 2>(call, rows, q, state);
        case 3: return attend_rows<T, WEIGHTED, 3>(call, rows, q, state);
        case 4: return attend_rows<T, WEIGHTED, 4>(call, rows, q, state);
        case 6: return attend_rows<T, WEIGHTED, 6>(call, rows, q, state);
        case 8: return attend_rows<T, WEIGHTED, 8>(call, rows, q, state);
    }
}

template <class T> void run(const Call& call, const typename T::Element* q, typename T::Element* out, float* lse) {
    auto tokens_of = [&](int64_t b) {
        int64_t tokens = 0;
        for (int64_t i = 0; i < call.num_segments; i++) tokens += rows_of(call.segments[i], b);
        return tokens;
    };
    Buffer<float> room;
    auto* query = queries<T>(q, call.batch * call.groups * call.heads * call.dim, room);
    auto* attend = call.weighted ? attend_rows<T, true> : attend_rows<T, false>;
    auto part = [&](int64_t b, int64_t group, int64_t first, int64_t count, State* state) {
        int64_t pair = b * call.groups + group;
        Rows rows(call, pair, first, count, call.dim * sizeof(*q));
        attend(call, rows, query + pair * call.heads * call.dim, state);
    };
    in_parts<T>({call.batch, call.groups, call.heads, call.dim, call.dim, 1}, tokens_of, part, out, lse);
}

}  // namespace

EXPORT void segment_attention(const PackedSegment& segments, const SegmentAttention& in) {
    bool weighted = std::any_of(&segments, &segments + in.num_segments, [](auto& s) { return s.log_weights; });
    float scale = (float)in.scale * (float)M_LOG2E;
    Call call{&segments, in.num_segments, in.batch, in.groups, in.heads, in.dim, scale, weighted};
    if (in.is_bf16)
        run<BF16>(call, (const bf16*)in.q, (bf16*)in.out, in.lse);
    else
        run<F32>(call, (const float*)in.q, (float*)in.out, in.lse);
}
