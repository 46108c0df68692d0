#include "affinity.h"

#include <sched.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "core/text.h"

namespace blocksparse::bench {

std::vector<int> usable_processors() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return {};
  std::vector<int> first, others;
  std::set<std::string> cores;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (!CPU_ISSET(i, &usable)) continue;
    std::ifstream file(concat("/sys/devices/system/cpu/cpu", i, "/topology/thread_siblings_list"));
    std::string siblings = concat("processor ", i);  // alone, if the kernel does not say
    std::getline(file, siblings);
    (cores.insert(siblings).second ? first : others).push_back(i);
  }
  first.insert(first.end(), others.begin(), others.end());
  return first;
}

// Libraries have thread pools of their own, so it does not suffice to confine one thread. Which thread of which pool
// gets which processor is not for us to say: the kernel places them within the set.
Status confine(const std::vector<int>& processors, int threads) {
  if (threads < 1 || processors.size() < static_cast<size_t>(threads)) {
    return invalid("threads=", threads, " needs as many processors, there are ", processors.size());
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < threads; ++i) CPU_SET(processors[static_cast<size_t>(i)], &set);
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    const int id = std::stoi(task.path().filename().string());
    if (sched_setaffinity(id, sizeof(set), &set) == 0 || errno == ESRCH)
      continue;  // the thread may have ended just
                 // now
    return {StatusCode::unavailable, concat("threads cannot be pinned: ", std::strerror(errno))};
  }
  return {};
}

}  // namespace blocksparse::bench
