// Does the compiled calls of a captured decode step again (replay.py).
#include "calls.hpp"

template <class T> static void copy(const CopyEntries& call) {
    T* out = (T*)call.out;
    for (int64_t a = 0; a < call.size0; a++)
        for (int64_t b = 0; b < call.size1; b++)
            for (int64_t c = 0; c < call.size2; c++)
                for (int64_t d = 0; d < call.size3; d++)
                    *out++ = ((const T*)call.x)[a * call.step0 + b * call.step1 + c * call.step2 + d * call.step3];
}

EXPORT void copy_entries(const CopyEntries& call) {
    if (call.width == 8) copy<int64_t>(call);
    if (call.width == 4) copy<int32_t>(call);
    if (call.width == 2) copy<int16_t>(call);
    if (call.width == 1) copy<int8_t>(call);
}

EXPORT void run_calls(const RunCalls& run) {
    for (const int64_t* call = run.calls; call < run.calls + 3 * run.count; call += 3) {
        auto first = (const void*)call[1], second = (const void*)call[2];
        if (second)
            ((void (*)(const void*, const void*))call[0])(first, second);
        else
            ((void (*)(const void*))call[0])(first);
    }
}
