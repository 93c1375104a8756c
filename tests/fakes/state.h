// What the fake CUDA runtime holds: one State per process, under one mutex, never destroyed.
//
// A device's memory is a memfd, so that other processes can map it; a stream is a queue of entries that are done piece
// by piece, in a random order among the streams, whenever the process calls the runtime. Nothing is done at enqueue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "device/gather.h"

namespace fake {

using Address = std::uintptr_t;

// Those of cudaError_t that can come.
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kMemoryAllocation = 2;
constexpr int kInitialization = 3;
constexpr int kInsufficientDriver = 35;
constexpr int kDevicesUnavailable = 46;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kDeviceUninitialized = 201;
constexpr int kMapBufferObjectFailed = 205;
constexpr int kPeerAccessUnsupported = 217;
constexpr int kInvalidResourceHandle = 400;
constexpr int kNotReady = 600;
constexpr int kIllegalAddress = 700;
constexpr int kPeerAccessAlreadyEnabled = 704;
constexpr int kHostMemoryAlreadyRegistered = 712;
constexpr int kHostMemoryNotRegistered = 713;
constexpr int kLaunchFailure = 719;
constexpr int kNotSupported = 801;
constexpr int kStreamCaptureUnsupported = 900;
constexpr int kUnknown = 999;

struct Range {
  Address begin = 0;
  std::size_t nbytes = 0;
  Address end() const { return begin + nbytes; }
  bool holds(const Range& other) const { return begin <= other.begin && other.end() <= end(); }
  bool meets(const Range& other) const { return begin < other.end() && other.begin < end(); }
};

// Memory of a device: its own (opens == 0), or another process's that is open here.
struct Block {
  Range range;
  int device = 0;  // index in this process
  int fd = -1;     // a file description of its own, which holds the lock while the block is open
  int opens = 0;
  std::string handle;  // that it was opened by
};

struct Registration {
  Range range;
  bool read_only = false;
};

using Flag = std::shared_ptr<bool>;

enum class Kind { copy, fill, check, cast, gather, mark };

// A part of an entry: reads `source`, writes `destination`; either may be empty.
struct Row {
  Range destination, source;
  std::size_t done = 0;  // items
  unsigned block = 0;    // gather: which one does this
};

// What the gather kernel was launched with.
struct Gather {
  const shmsync::cuda::GatherRow* rows = nullptr;
  unsigned count = 0;
  char* base = nullptr;
};

struct Entry {
  Kind kind = Kind::mark;
  std::vector<Row> rows;    // in any order
  std::vector<Flag> after;  // what has to be done first
  Flag done = std::make_shared<bool>(false);
  unsigned char value = 0;                  // fill
  unsigned char least = 255, most = 0;      // check
  unsigned char* seen = nullptr;            // check: where the two go
  int cast = 0;
  Gather gather;
};

struct Stream {
  int device = 0;
  bool blocking = false;  // waits for the default stream and makes it wait
  bool destroyed = false;
  std::deque<Entry> queue;
  Flag last;  // of the entry that was queued last
};

struct Event {
  int device = 0;
  Flag latest;  // of the latest record
};

struct Fault {
  long nth = 0;  // which call from now on
  int error = 0;
  bool always = false;
};

inline std::string variable(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : otherwise;
}

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

struct State {
  std::mutex mutex;
  std::mt19937_64 random;
  std::vector<int> physical;  // by index
  int version = 13000;
  bool peers = true;
  std::map<int, std::size_t> limits;  // of bytes, by index
  std::map<int, int> attributes;

  std::map<Address, Block> blocks;
  std::vector<Range> freed;  // kept reserved, so that their addresses are never anything else
  std::map<Address, Registration> registrations;
  std::map<Address, Stream> streams;
  std::map<Address, Event> events;
  Address next_handle = 0x5a0000001000;  // never used twice
  std::set<int> contexts;
  std::set<std::pair<int, int>> enabled_peers;
  std::map<Address, int> modules, kernels;  // by handle: the device; they are never unloaded

  std::multimap<std::string, Fault> faults;
  std::vector<std::string> violations;
  bool capturing = false;  // some thread captures a graph, in the mode that concerns all threads

  State() { restart(); }

  void restart() {
    physical.clear();
    const std::string numbers = variable("FAKE_CUDA_DEVICES", "0");
    for (const std::string& number : split(numbers, ',')) physical.push_back(std::stoi(number));
    random.seed(std::stoull(variable("FAKE_CUDA_SEED", "0")));
    version = std::stoi(variable("FAKE_CUDA_VERSION", "13000"));
    peers = variable("FAKE_CUDA_PEERS", "1") != "0";
    attributes = {{41, 1}, {113, 1}};  // unified addressing, read-only registration
    limits.clear();
    const std::string limit = variable("FAKE_CUDA_BYTES", "");
    for (std::size_t i = 0; i < physical.size() && !limit.empty(); ++i) limits[int(i)] = std::stoull(limit);
    for (const std::string& fault : split(variable("FAKE_CUDA_FAIL", ""), ',')) add_fault(split(fault, ':'));
  }

  // function, which call from now on or "*", error
  void add_fault(const std::vector<std::string>& parts) {
    const bool always = parts.at(1) == "*";
    faults.insert({parts.at(0), {always ? 0 : std::stol(parts.at(1)), std::stoi(parts.at(2)), always}});
  }

  void violation(const std::string& what) { violations.push_back(what); }

  // A whole number below `end`.
  std::size_t below(std::size_t end) { return end == 0 ? 0 : random() % end; }

  bool is_device(int index) const { return index >= 0 && index < int(physical.size()); }

  int index_of(int number) const {
    for (std::size_t i = 0; i < physical.size(); ++i) {
      if (physical[i] == number) return int(i);
    }
    return -1;
  }

  Address new_handle() { return next_handle += 0x100; }
};

// Not destroyed: other threads may still be in a call when the process ends. Made when the library is opened, not at the
// first call: the fake is built without ThreadSanitizer, which would not see that threads wait for a function's static.
inline State* const the_state = new State;

inline State& state() { return *the_state; }

}  // namespace fake
