// Included ahead of llama.cpp's C++ sources in builds for Vulkan.
//
// To switch on a layer for debugging, ggml-vulkan.cpp fills in two types that Vulkan's C++ headers have since version
// 1.3.272; Debian 12 has 1.3.239. The layer is off, so it is enough that they take what is written to them, and that
// the second begins as every structure in Vulkan's chains does: a loader skips what it does not know. Newer headers
// have both, and nothing is added.
#if defined(__cplusplus) && defined(__has_include)
#if __has_include(<vulkan/vulkan_core.h>)
#include <vulkan/vulkan_core.h>
#if VK_HEADER_VERSION < 272
#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char *pLayerName;
    const char *pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void *pValues;
};

struct LayerSettingsCreateInfoEXT {
    // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    VkStructureType sType = static_cast<VkStructureType>(1000496000);
    const void *pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT *pSettings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> &settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}
};

} // namespace vk
#endif
#endif
#endif
