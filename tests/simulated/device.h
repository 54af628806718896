// What the two halves of the simulated accelerator share: settings, streams, events, memory, the order check.
#pragma once
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;
using Guard = std::unique_lock<std::mutex>;
using Clock = std::vector<uint64_t>;  // by stream: how many of its tasks have surely been done

struct Settings {
  std::atomic<int> delay_us{0};    // a kernel starts up to this much late, at random
  std::atomic<bool> lazy{false};   // a stream does only what somebody waits for
  std::atomic<bool> poison{true};  // new and freed memory reads as NaN or -1
  std::atomic<bool> eager_reuse{true};  // memory counts as another's once it is freed; else once it is taken
  std::atomic<int> races{2};       // unordered accesses: 0 ignored, 1 listed, 2 raised
  std::atomic<int> waits{1};       // implicit waits of the host: 0 ignored, 1 counted, 2 raised
  std::atomic<int64_t> capacity{int64_t(1) << 31};
};
Settings& settings();

struct Stream;
struct Moment {  // an event as it was recorded
  Stream* stream;
  uint64_t index;
  Clock clock;
  std::mutex lock;
  std::condition_variable reached;
  bool passed = false;
  std::chrono::steady_clock::time_point at;
};
using MomentPtr = std::shared_ptr<Moment>;

struct Task {
  std::string name;
  std::function<void()> run;
  bool is_kernel;
};

struct Stream {  // a thread that does its tasks in order
  int device, number, priority;
  bool never_lazy;
  c10::StreamId id;
  Clock clock;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t n_given = 0, n_done = 0, n_demanded = 0, dice;
  bool has_thread = false;

  uint64_t give(Task task);
  void demand(uint64_t index);
  void finish(uint64_t index);  // blocks
  void live();
  c10::Stream as_torch() const;
};

int device_count();
int current_device();
int exchange_device(int device);
Stream& find_stream(int device, c10::StreamId id);
Stream& make_stream(int device, int priority, bool never_lazy);
Stream& current_stream(int device);
Stream& exchange_stream(Stream& stream);
void close_streams();
int n_strays();  // questions asked by threads, beside the first, whose current device is not the event's

MomentPtr record(Stream& stream);
void wait(Stream& stream, const MomentPtr& moment);  // the stream waits, not the host
void synchronize(const MomentPtr& moment);
void synchronize(Stream& stream);
void synchronize(int device);

struct Span {  // bytes a task touches
  const char *begin, *end;
  bool writes;
};
void launch(Stream& stream, const std::string& name, const std::vector<Span>& spans, std::function<void()> run);
void check(Stream& stream, const std::string& name, const std::vector<Span>& spans);
void use_on(const void* address, Stream& stream);  // Tensor.record_stream

char* host_view(const void* address);  // where this process may touch what a device calls ``address``
void count_wait(const std::string& what);
void on_wait(std::function<void(const std::string&)> call);
std::vector<std::string> take_races();

}  // namespace sim
