#include <string>

#include "base/checks.h"
#include "python/rules.h"

namespace rtp {

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

void parse(const std::string& text, Wire& parsed) {
  RTP_CHECK_VALUE(text == "bfloat16" || text == "int8", "expected travel bfloat16, int8 or None, got ", text);
  parsed = text == "int8" ? Wire::int8 : Wire::bfloat16;
}

void parse(const std::string& text, BlockFormat& parsed) {
  for (const BlockFormat format : {BlockFormat::nf4, BlockFormat::mxfp4, BlockFormat::int8}) {
    if (text != name(format)) continue;
    parsed = format;
    return;
  }
  RTP_CHECK_VALUE(false, "expected nf4, mxfp4 or int8, got ", text);
}

const char* name(BlockFormat format) {
  return format == BlockFormat::nf4 ? "nf4" : format == BlockFormat::mxfp4 ? "mxfp4" : "int8";
}

}  // namespace rtp
