// Attends from one token to keys and values that are codes, and decodes chosen rows of them. Only codes are read from memory:
// bf16 attends to them as they are where AVX2, AVX-512 or AMX can (coded_scaled.hpp), in half the time; otherwise a block of rows is
// decoded into L1, for all heads of its group at once, and attended to there as other rows are.
#include "calls.hpp"
#include "coded_dots.hpp"
#include "coded_tiles.hpp"

namespace {

// Names rows of a head: those listed, or all from `first` on. `blocks` lists the rows of `k_range` that belong to them.
struct Chosen {
    const int64_t *rows, *blocks;
    int64_t first, count;
};

// Decodes rows of one head to numbers of type Element.
template <class Element> struct Reader {
    virtual ~Reader() = default;
    // Writes keys and values to rows of `width` numbers, and what the signs of keys add to them, if they have some.
    virtual void read(const Chosen& chosen, int64_t width, Element* k, Element* v, Element* signs) = 0;
};

template <class Element, class KeyFormat, class Format> struct ReaderOf : Reader<Element> {
    static constexpr bool FOUR = std::is_same_v<Format, Floats4>;
    static constexpr float NONE[MOST_RANGES] = {};
    const Codes& in;
    const Places at;
    const typename KeyFormat::Table key_numbers;
    const typename Format::Table numbers;
    const bool kept_is_bf16;
    int64_t block = -1;  // whose range of keys is in k_range
    alignas(LINE) float k_range[2 * MOST_DIM];
    uint8_t range[MOST_DIM / LANES];  // of a value's channels, sixteen at a time

    ReaderOf(const Codes& in, int64_t sequence, int64_t group, bool kept_is_bf16)
        : in(in), at(in, sequence, group), key_numbers(in.key_levels), numbers(in.levels), kept_is_bf16(kept_is_bf16) {
        for (int64_t c = 0; c < in.dim; c += LANES) range[c / LANES] = Format::RANGED || FOUR ? c * in.ranges / in.dim : 0;
    }

    // Writes the scale of each sixteen channels of a row's key, then those of its value.
    void read_scales(int64_t row, int64_t of_block, float* to) const {
        alignas(LINE) uint8_t codes[2 * MOST_RANGES] = {};
        alignas(LINE) float numbers[2 * MOST_RANGES];
        std::memcpy(codes, at.v_range[row], 2 * in.ranges);
        for (int c = 0; c < 2 * MOST_RANGES; c += LANES) store(numbers + c, Floats::Table(nullptr)(codes + c));
        const float* of_tensor = (const float*)at.k_range[of_block];
        for (int r = 0; r < in.ranges; r++) {
            to[r] = numbers[r] * of_tensor[0];
            to[in.ranges + r] = numbers[in.ranges + r] * of_tensor[1];
        }
    }

    // Writes the channels of keys that are kept in full.
    void put_kept(const Chosen& chosen, int64_t width, Element* k) const {
        for (int64_t i = chosen.first; i < chosen.first + chosen.count; i++, k += width) {
            const int64_t row = chosen.rows ? chosen.rows[i] : i;
            const uint8_t* which = (const uint8_t*)at.which[chosen.blocks ? chosen.blocks[i] : row / in.block];
            for (int64_t j = 0; j < in.channels; j++)
                put(k + which[j], kept_is_bf16 ? to_float(((const bf16*)at.kept[row])[j]) : ((const float*)at.kept[row])[j]);
        }
    }

    void read(const Chosen& chosen, int64_t width, Element* k, Element* v, Element* signs) override {
        decode(chosen, width, k, v, signs);
        if (in.channels) put_kept(chosen, width, k);
    }

    // Writes what the codes of some rows stand for. It is a function of its own because it takes a sixth longer with
    // `put_kept` in its body.
    __attribute__((noinline)) void decode(const Chosen& chosen, int64_t width, Element* k, Element* v, Element* signs) {
        const int dim = in.dim;
        for (int64_t i = 0; i < chosen.count; i++, k += width, v += width, signs += width) {
            const int64_t row = chosen.rows ? chosen.rows[chosen.first + i] : chosen.first + i;
            const char *of_key = at.k[row], *of_value = at.v[row];
            if (!chosen.rows) {
                fetch(of_key + TOKENS * at.k.row, Format::RANGED ? KeyFormat::bytes(dim) : Format::bytes(dim));
                fetch(of_value + TOKENS * at.v.row, Format::bytes(dim));
            }
            alignas(LINE) float scales[2 * MOST_RANGES + LANES];
            if constexpr (FOUR) {
                read_scales(row, chosen.blocks ? chosen.blocks[chosen.first + i] : row / in.block, scales);
                decode_row<KeyFormat>(of_key, dim, key_numbers, OfRanges{NONE, scales, range}, k);
                decode_row<Format>(of_value, dim, numbers, OfRanges{NONE, scales + in.ranges, range}, v);
                continue;
            }
            widen_halves(at.v_range[row], Format::RANGED ? 2 * in.ranges : in.ranges, scales);
            if constexpr (Format::RANGED) {
                int64_t of_block = chosen.blocks ? chosen.blocks[chosen.first + i] : row / in.block;
                if (of_block != block) widen_halves(at.k_range[block = of_block], 2 * dim, k_range);
                decode_row<KeyFormat>(of_key, dim, key_numbers, OfChannels{k_range, k_range + dim}, k);
                OfRanges of_ranges{scales, scales + in.ranges, range};
                decode_row<Format>(of_value, dim, numbers, of_ranges, v);
            } else {
                decode_row<KeyFormat>(of_key, dim, key_numbers, OfRow{scales[0]}, k);
                if (in.ranges == 3) {
                    const float size = scales[2] * (float)in.residual, least = -size, step = 2 * size;
                    decode_row<Integers<1>>(of_key + KeyFormat::bytes(dim), dim, Integers<1>::Table(nullptr),
                                            OfRanges{&least, &step, range}, signs);
                }
                decode_row<Format>(of_value, dim, numbers, OfRow{scales[1]}, v);
            }
        }
    }
};

template <class Make> auto of_integers(int64_t bits, Make make) {
    return bits == 2 ? make(Integers<2>{}) : bits == 4 ? make(Integers<4>{}) : make(Integers<8>{});
}

// Returns make(format of keys, format of values).
template <class Make> auto of_formats(const Codes& in, Make make) {
    const bool signs = in.ranges == 3;  // the third scale is that of the signs
    if (in.kind == INTEGERS)
        return of_integers(in.key_bits, [&](auto key) { return of_integers(in.bits, [&](auto value) { return make(key, value); }); });
    if (in.kind == FLOATS) return make(Floats{}, Floats{});
    if (in.kind == FLOATS4) return make(Floats4{}, Floats4{});
    switch (in.bits) {
        case 2: return signs ? make(Levels<1>{}, Levels<2>{}) : make(Levels<2>{}, Levels<2>{});
        case 3: return signs ? make(Levels<2>{}, Levels<3>{}) : make(Levels<3>{}, Levels<3>{});
        default: return signs ? make(Levels<3>{}, Levels<4>{}) : make(Levels<4>{}, Levels<4>{});
    }
}

template <class Element>
std::unique_ptr<Reader<Element>> reader_of(const Codes& in, int64_t sequence, int64_t group, bool kept_is_bf16) {
    return of_formats(in, [&](auto key, auto value) -> std::unique_ptr<Reader<Element>> {
        return std::make_unique<ReaderOf<Element, decltype(key), decltype(value)>>(in, sequence, group, kept_is_bf16);
    });
}

std::unique_ptr<BlockReader> block_reader_of(const Codes& in, int64_t sequence, int64_t group) {
    return of_formats(in, [&](auto key, auto value) -> std::unique_ptr<BlockReader> {
        return std::make_unique<BlockReaderOf<decltype(key), decltype(value)>>(in, sequence, group);
    });
}

// Returns what attends from heads of a group, `head` and those after it, to codes as they are. It is nothing where they have
// to be decoded first.
template <class T>
std::unique_ptr<ScaledAttention> scaled_of(const CodedAttention& in, int64_t sequence, int64_t group, int64_t head) {
    std::unique_ptr<ScaledAttention> made;
    if (!std::is_same_v<T, BF16>) return made;
    const int heads = std::min<int64_t>(MOST_HEADS, in.heads - head);
    // one head saves less on tiles than it takes to make bf16 numbers of 8 bits, and few heads fill no tile; sums on tiles
    // are those of all channels, so that they cannot take scales of some of them
    const bool on_tiles =
        uses_tiles<T>() && in.codes.kind != FLOATS4 && !in.codes.channels && (in.heads > 1 || in.codes.bits < 8);
#if defined(HAS_DOTS)
    const int64_t from = (sequence * in.groups + group) * in.heads * in.width, numbers = in.heads * in.width;
    auto finite = [&](const void* x) {
        const bf16* q = (const bf16*)x + from;
        return !x || std::all_of(q, q + numbers, [](bf16 x) { return (x & 0x7f80) != 0x7f80; });
    };
    if ((!on_tiles || in.heads <= 4) && finite(in.q) && finite(in.q_signs))  // others are no whole numbers
        of_formats(in.codes, [&](auto key, auto value) {
            using Key = decltype(key);
            using Value = decltype(value);
            if constexpr (HAS_HALVES<Key> && HAS_HALVES<Value>)
                if (DotAttention<Key, Value>::takes(in))
                    made = std::make_unique<DotAttention<Key, Value>>(in, sequence, group, head, heads);
        });
#if !defined(__AVX512F__)
    if (!on_tiles && in.codes.kind == FLOATS && finite(in.q))
        made = std::make_unique<FloatAttention>(in, sequence, group, head, heads);
#endif
#endif
    if (on_tiles && !made)
        made = std::make_unique<TileAttention>(in, block_reader_of(in.codes, sequence, group), sequence, group, head,
                                               heads);
    return made;
}

// Attends from the heads of a group to `count` tokens from `first` on, whose decoded keys and values have L lines.
template <class T, int L>
void attend_rows(const CodedAttention& in, Reader<typename T::Element>& reader, const typename T::Element* q,
                 const typename T::Element* q_signs, int64_t first, int64_t count, State* state) {
    using Element = typename T::Element;
    constexpr int WIDTH = L * T::WIDTH;
    const float scale = (float)in.scale * (float)M_LOG2E;
    alignas(LINE) Element k[TOKENS][WIDTH] = {}, v[TOKENS][WIDTH] = {}, signs[TOKENS][WIDTH] = {};  // zero past a head's channels
    Buffer<float> room, sign_room;
    const auto* wide = queries<T>(q, in.heads * WIDTH, room);
    const auto* wide_signs = q_signs ? queries<T>(q_signs, in.heads * WIDTH, sign_room) : nullptr;
    Block block;
    const char* sign_rows[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        block.k[t] = (const char*)k[t];
        block.v[t] = (const char*)v[t];
        sign_rows[t] = (const char*)signs[t];
    }
    for (int64_t at = 0; at < count; at += TOKENS) {
        block.count = std::min<int64_t>(TOKENS, count - at);
        reader.read({nullptr, nullptr, first + at, block.count}, WIDTH, k[0], v[0], signs[0]);
        for (int h = 0; h < in.heads; h += HEADS) {
            const int heads = std::min<int>(HEADS, in.heads - h);
            alignas(LINE) float logits[HEADS][TOKENS], more[HEADS][TOKENS];
            block_logits<T, L>(wide + h * WIDTH, block.k, block.v, heads, scale, logits[0], TOKENS);
            if (q_signs) {
                block_logits<T, L>(wide_signs + h * WIDTH, sign_rows, block.v, heads, scale, more[0], TOKENS);
                for (int i = 0; i < heads; i++)
                    for (int t = 0; t < TOKENS; t++) logits[i][t] += more[i][t];
            }
            attend_logits<T, L, false>(block, block.k, logits, state + h, heads);
        }
    }
}

template <class T>
bool attend_rows(const CodedAttention& in, Reader<typename T::Element>& reader, const typename T::Element* q,
                 const typename T::Element* q_signs, int64_t first, int64_t count, State* state) {
    auto attend = [&](auto lines) { return attend_rows<T, lines>(in, reader, q, q_signs, first, count, state), true; };
    switch (in.width / T::WIDTH) {
        case 1: return attend(std::integral_constant<int, 1>{});
        case 2: return attend(std::integral_constant<int, 2>{});
        case 3: return attend(std::integral_constant<int, 3>{});
        case 4: return attend(std::integral_constant<int, 4>{});
        case 6: return attend(std::integral_constant<int, 6>{});
        case 8: return attend(std::integral_constant<int, 8>{});
    }
    return false;
}

// Attends with queries in bf16 to codes that become fp32, which takes fewer steps than bf16 that is widened again. Returns
// whether heads are not too large for it.
template <class Narrow>
bool attend_widened(const CodedAttention& in, const Narrow* q, const Narrow* q_signs, int64_t b, int64_t group, int64_t first,
                    int64_t count, State* state) {
    const int64_t size = in.heads * in.width;
    Buffer<float> wide(2 * size);
    widened(q, size, wide.data());
    if (q_signs) widened(q_signs, size, &wide[size]);
    auto reader = reader_of<float>(in.codes, b, group, true);
    if (!attend_rows<F32>(in, *reader, wide.data(), q_signs ? &wide[size] : nullptr, first, count, state)) return false;
    for (int64_t h = 0; h < in.heads; h++) {
        std::copy_n(state[h].acc, in.width, wide.data());
        for (int64_t c = 0; c < in.width; c++) state[h].acc[channel(BF16{}, c)] = wide[c];
    }
    return true;
}

template <class T> void run(const CodedAttention& in) {
    using Element = typename T::Element;
    auto tokens_of = [&](int64_t b) { return in.counts ? std::min(in.counts[b], in.count) : in.count; };
    auto part = [&](int64_t b, int64_t group, int64_t first, int64_t count, State* state) {
        int64_t h = 0;
        for (; h < in.heads; h += MOST_HEADS) {
            auto attention = scaled_of<T>(in, b, group, h);
            if (!attention) break;
            attention->run(first, count, state + h);
        }
        if (h) return;
        const int64_t queries = (b * in.groups + group) * in.heads * in.width;
        const Element *q = (const Element*)in.q + queries, *signs = in.q_signs ? (const Element*)in.q_signs + queries : nullptr;
        if constexpr (WIDENS && std::is_same_v<T, BF16>)
            if (attend_widened(in, q, signs, b, group, first, count, state)) return;
        attend_rows<T>(in, *reader_of<Element>(in.codes, b, group, in.is_bf16), q, signs, first, count, state);
    };
    in_parts<T>({in.batch, in.groups, in.heads, in.codes.dim, in.width, TOKENS}, tokens_of, part, (Element*)in.out, in.lse);
}

template <class Element> void decode(const DecodeRows& in) {
    constexpr int64_t AT_ONCE = 64;  // rows of a task
    const int64_t shares = (in.count + AT_ONCE - 1) / AT_ONCE, dim = in.codes.dim;
    each_task(in.pairs * shares, in.pairs * in.count > AT_ONCE, [&](int64_t task) {
        const int64_t pair = task / shares, first = task % shares * AT_ONCE, from = pair * in.count;
        const int64_t sequence = pair / in.groups;
        const int64_t all = !in.rows && in.counts ? std::min(in.counts[sequence], in.count) : in.count;
        Chosen chosen{in.rows ? in.rows + from : nullptr, in.blocks ? in.blocks + from : nullptr, first,
                      std::min(AT_ONCE, all - first)};
        Element *k = (Element*)in.k_out + (from + first) * dim, *v = (Element*)in.v_out + (from + first) * dim;
        reader_of<Element>(in.codes, sequence, pair % in.groups, in.is_bf16)->read(chosen, dim, k, v, nullptr);
    });
}

}  // namespace

EXPORT void coded_attention(const CodedAttention& in) { in.is_bf16 ? run<BF16>(in) : run<F32>(in); }
EXPORT void decode_rows(const DecodeRows& in) { in.is_bf16 ? decode<bf16>(in) : decode<float>(in); }
EXPORT int64_t is_on_tiles() { return has_tiles(); }
