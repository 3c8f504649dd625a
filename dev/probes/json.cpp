/* JSON for Modern C++: its parser with a handler of our own, as in llmc_zero/safetensors.cuh. */
#include <nlohmann/json.hpp>
#include <string>

struct Handler {
    uint64_t number = 0;
    std::string names;
    bool null() { return false; }
    bool boolean(bool) { return false; }
    bool number_integer(int64_t) { return false; }
    bool number_unsigned(uint64_t value) { return number = value, true; }
    bool number_float(double, const std::string&) { return false; }
    bool string(std::string&) { return false; }
    template <typename Binary> bool binary(Binary&) { return false; }
    bool start_object(std::size_t) { return true; }
    bool key(std::string& name) { return names += name, true; }
    bool end_object() { return true; }
    bool start_array(std::size_t) { return true; }
    bool end_array() { return true; }
    template <typename Exception> bool parse_error(std::size_t, const std::string&, const Exception&) {
        return false;
    }
};

int main() {
    const std::string text = "{\"shape\": [18446744073709551615]}";
    Handler handler;
    const bool read = nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
    return read && handler.names == "shape" && handler.number == UINT64_MAX ? 0 : 1;
}
