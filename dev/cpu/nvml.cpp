/* dev/cpu/nvml.cpp - NVML, for programs that link it: there is no driver here, and every call says so

   A program that finds nvml.h calls these through NVML's own prototypes, all of which return an nvmlReturn_t
   (a C enum). The arguments are left alone, so none are declared; nvml.h itself is not needed.
*/
#define CUDA_CPU_NVML(name) \
    int name(void) { return 9; } /* NVML_ERROR_DRIVER_NOT_LOADED */

extern "C" {

const char* nvmlErrorString(int error) {
    return error == 0 ? "Success" : error == 9 ? "Driver Not Loaded" : "Unknown Error";
}

CUDA_CPU_NVML(nvmlInit)
CUDA_CPU_NVML(nvmlInit_v2)
CUDA_CPU_NVML(nvmlInitWithFlags)
CUDA_CPU_NVML(nvmlShutdown)
CUDA_CPU_NVML(nvmlDeviceGetCount)
CUDA_CPU_NVML(nvmlDeviceGetCount_v2)
CUDA_CPU_NVML(nvmlDeviceGetHandleByIndex)
CUDA_CPU_NVML(nvmlDeviceGetHandleByIndex_v2)
CUDA_CPU_NVML(nvmlDeviceGetHandleByPciBusId)
CUDA_CPU_NVML(nvmlDeviceGetHandleByPciBusId_v2)
CUDA_CPU_NVML(nvmlDeviceGetHandleByUUID)
CUDA_CPU_NVML(nvmlDeviceGetName)
CUDA_CPU_NVML(nvmlDeviceGetUUID)
CUDA_CPU_NVML(nvmlDeviceGetMemoryInfo)
CUDA_CPU_NVML(nvmlDeviceGetClockInfo)
CUDA_CPU_NVML(nvmlDeviceGetMaxClockInfo)
CUDA_CPU_NVML(nvmlDeviceGetPowerUsage)
CUDA_CPU_NVML(nvmlDeviceGetPowerManagementLimit)
CUDA_CPU_NVML(nvmlDeviceGetTotalEnergyConsumption)
CUDA_CPU_NVML(nvmlDeviceGetTemperature)
CUDA_CPU_NVML(nvmlDeviceGetTemperatureThreshold)
CUDA_CPU_NVML(nvmlDeviceGetCurrentClocksThrottleReasons)
CUDA_CPU_NVML(nvmlDeviceGetCurrentClocksEventReasons)
CUDA_CPU_NVML(nvmlDeviceGetFanSpeed)
CUDA_CPU_NVML(nvmlDeviceGetUtilizationRates)
CUDA_CPU_NVML(nvmlDeviceGetSamples)

} // extern "C"
