// Loaded before everything else (LD_PRELOAD): a thread that yields to wait for a peer sleeps for a
// moment instead. Proxy threads poll for GPUs all the time, and there are more of them than CPUs.
#include <unistd.h>

extern "C" int sched_yield() {  // NOLINT(readability-identifier-naming): the name in libc
  // At 50 the naps of idle proxies took a quarter of the CPU time of a run.
  constexpr unsigned kNapUs = 500;
  usleep(kNapUs);
  return 0;
}
