#include "problems.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "core/text.h"

namespace blocksparse::bench {

namespace {

Status expand(const std::string& line, std::vector<std::string>& problems) {
  const size_t open = line.find('{');
  if (open == std::string::npos) {
    problems.push_back(line);
    return {};
  }
  const size_t close = line.find('}', open);
  if (close == std::string::npos) return invalid("\"", line, "\" has an open brace");
  int depth = 0;  // commas in parentheses belong to the word
  for (size_t first = open + 1, at = first; at <= close; ++at) {
    depth += (line[at] == '(') - (line[at] == ')');
    if (at < close && (line[at] != ',' || depth > 0)) continue;
    BS_RETURN_IF_ERROR(
        expand(concat(line.substr(0, open), line.substr(first, at - first), line.substr(close + 1)), problems));
    first = at + 1;
  }
  return {};
}

}  // namespace

Status read_problems(const std::string& path, std::vector<std::string>& problems) {
  if (std::error_code error; std::filesystem::is_directory(path, error)) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
      if (entry.path().extension() == ".txt") files.push_back(entry.path().string());
    }
    if (files.empty()) return invalid("there is no *.txt in ", path);
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) BS_RETURN_IF_ERROR(read_problems(file, problems));
    return {};
  }
  std::ifstream file(path);
  if (!file) return invalid("cannot read ", path);
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") != std::string::npos) BS_RETURN_IF_ERROR(expand(line, problems));
  }
  return {};
}

}  // namespace blocksparse::bench
