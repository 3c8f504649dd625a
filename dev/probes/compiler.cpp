/* C++17 and its library. Each file here uses what the project uses of one part; see dev/probe.sh. */
#include <map>
#include <optional>
#include <string>
#include <string_view>

int main() {
    const std::map<std::string, int> sizes = {{"fp32", 4}, {"bf16", 2}};
    std::optional<int> sum = 0;
    for (const auto& [name, bytes] : sizes)
        if (std::string_view(name).size() == 4) *sum += bytes;
    return *sum == 6 ? 0 : 1;
}
