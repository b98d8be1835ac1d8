// The threads of one pass: a barrier that spins and then yields, and two ways to share out work.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace tandem {

/// Spins before a waiting thread gives its processor to others: a neighbour's work costs it then, not the whole pass.
constexpr int PATIENCE = 2000;

struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};

/// What the threads of a pass share. ``next`` hands out items of the phase under way; there are two, for a thread may
/// be in the next phase while another leaves this one.
struct Shared {
    Counter arrived, next[2];
};

/// One thread of a pass.
class Thread {
  public:
    const int64_t id, count;

    Thread(Shared& shared, int64_t id, int64_t count) : id(id), count(count), shared(shared) {}

    void wait() {
        if (count == 1) return;
        target += count;
        if (shared.arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 == target) return;
        for (int spins = 0; shared.arrived.value.load(std::memory_order_acquire) < target;) {
            _mm_pause();
            if (++spins > PATIENCE) sched_yield(), spins = 0;
        }
    }

    int64_t from(int64_t n) const { return n * id / count; }
    int64_t to(int64_t n) const { return n * (id + 1) / count; }

    /// Whoever is free takes the next of ``n`` items; everyone waits at the end.
    template <class F> void each(int64_t n, F&& work) {
        if (count == 1) {
            for (int64_t i = 0; i < n; i++) work(i);
            return;
        }
        std::atomic<int64_t>& next = shared.next[phase & 1].value;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
        wait();
        if (id == 0) next.store(0, std::memory_order_relaxed);
        phase++;
    }

  private:
    Shared& shared;
    int64_t target = 0, phase = 0;
};

/// ``work(Thread&)`` by ``count`` threads at once.
template <class F> void together(int64_t count, F&& work) {
    Shared shared;
    if (count <= 1) {
        Thread alone(shared, 0, 1);
        work(alone);
        return;
    }
#pragma omp parallel num_threads(int(count))
    {
        Thread thread(shared, omp_get_thread_num(), omp_get_num_threads());
        work(thread);
    }
}

}  // namespace tandem
