#include <iterator>
#include <string>

#include "base/checks.h"
#include "python/rules.h"

namespace rtp {
namespace {

// by BlockFormat
constexpr const char* kBlockFormats[] = {"nf4", "mxfp4", "int8", "fp4", "nf4-torchao", "nf4-torchao-bfloat16"};

constexpr const char* kScaleRules[] = {"linear", "power_of_two", "e8m0_floor", "e8m0_ceil"};  // by ScaleRule
constexpr const char* kCodeFormats[] = {"e4m3", "e5m2"};                                      // by CodeFormat

// The enum whose name is in `names`. Throws ValueError with all names for any other text.
template <typename Enum, size_t kCount>
Enum named(const std::string& text, const char* what, const char* const (&names)[kCount]) {
  std::string all;
  for (size_t index = 0; index < kCount; ++index) {
    if (text == names[index]) return static_cast<Enum>(index);
    all.append(index == 0 ? "" : ", ").append(names[index]);
  }
  RTP_CHECK_VALUE(false, "expected ", what, " of ", all, ", got ", text);
}

}  // namespace

void parse(const std::string& text, ScaleRule& parsed) { parsed = named<ScaleRule>(text, "a rule", kScaleRules); }

void parse(const std::string& text, CodeFormat& parsed) { parsed = named<CodeFormat>(text, "codes", kCodeFormats); }

const char* name(ScaleRule rule) { return kScaleRules[static_cast<size_t>(rule)]; }

const char* name(CodeFormat format) { return kCodeFormats[static_cast<size_t>(format)]; }

void parse(const std::string& text, Pass& parsed) {
  RTP_CHECK_VALUE(text == "forward" || text == "backward", "expected a pass of forward or backward, got ", text);
  parsed = text == "forward" ? Pass::forward : Pass::backward;
}

void parse(const std::string& text, Route& parsed) {
  for (const Route route : {Route::ring, Route::direct, Route::gather, Route::two_level}) {
    if (text == name(route)) {
      parsed = route;
      return;
    }
  }
  RTP_CHECK_VALUE(false, "expected a route of ring, direct, gather or two-level, got ", text);
}

void parse(const std::string& text, GradientRoute& parsed) {
  RTP_CHECK_VALUE(text == "chain" || text == "direct", "expected a gradient route of chain or direct, got ", text);
  parsed = text == "chain" ? GradientRoute::chain : GradientRoute::direct;
}

void parse(const std::string& text, Channel& parsed) {
  RTP_CHECK_VALUE(text == "weight" || text == "gradient", "expected a channel of weight or gradient, got ", text);
  parsed = text == "weight" ? Channel::weight : Channel::gradient;
}

void parse(const std::string& text, TravelFormat& parsed) {
  RTP_CHECK_VALUE(text == "bfloat16" || text == "int8", "expected travel bfloat16, int8 or None, got ", text);
  parsed = text == "int8" ? TravelFormat::int8 : TravelFormat::bfloat16;
}

void parse(const std::string& text, BlockFormat& parsed) {
  std::string names;
  for (size_t format = 0; format < std::size(kBlockFormats); ++format) {
    parsed = static_cast<BlockFormat>(format);
    if (text == name(parsed)) return;
    names.append(format == 0 ? "" : ", ").append(name(parsed));
  }
  RTP_CHECK_VALUE(false, "expected one of ", names, ", got ", text);
}

const char* name(BlockFormat format) { return kBlockFormats[static_cast<size_t>(format)]; }

}  // namespace rtp
