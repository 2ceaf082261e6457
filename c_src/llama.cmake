# The pinned llama.cpp with our call sites, built once and only as far as needed.

set(LLAMA_TREE ${CMAKE_CURRENT_BINARY_DIR}/llama.cpp-src)
file(GLOB patches CONFIGURE_DEPENDS patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${patches} ${SCRIPTS}/fetch_llama_cpp.py)
# A relative TQ_LLAMA_CPP_SRC or TQ_GGML_CACHE is meant from the repository's root, wherever the build tree is.
execute_process(
    COMMAND ${Python_EXECUTABLE} ${SCRIPTS}/fetch_llama_cpp.py ${LLAMA_TREE}
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/..
    RESULT_VARIABLE fetched)
if(fetched)
    message(FATAL_ERROR "the llama.cpp source could not be made ready (see above)")
endif()

# Plain variables, which llama.cpp's options yield to: in the cache they would outlive a change of TQ_NATIVE.
set(BUILD_SHARED_LIBS ON)
set(GGML_NATIVE ${TQ_NATIVE})
if(NOT TQ_NATIVE)
    # ggml's own idea of "not native" still assumes AVX2; a wheel that travels must start on any x86-64. Nor can it
    # count on an OpenMP library there: ggml's own threads do the same work.
    foreach(feature SSE42 AVX AVX2 BMI2 FMA F16C OPENMP)
        set(GGML_${feature} OFF)
    endforeach()
endif()
# Our types are for the CPU alone; on a Mac ggml would prefer these.
foreach(backend METAL BLAS)
    set(GGML_${backend} OFF)
endforeach()
# Other machines' CPUs (docs/rpc.md). Over TCP alone: the library for more would be whatever the builder happens to have.
set(GGML_RPC ON)
set(GGML_RPC_RDMA OFF)
foreach(part TESTS EXAMPLES APP UI)
    set(LLAMA_BUILD_${part} OFF)
endforeach()
# llama.cpp's own programs, built when named. Its web page would be downloaded while it builds; `tq-ggml serve` has one.
foreach(part COMMON TOOLS SERVER)
    set(LLAMA_BUILD_${part} ON)
endforeach()
set(LLAMA_USE_PREBUILT_UI OFF)
add_subdirectory(${LLAMA_TREE} llama.cpp EXCLUDE_FROM_ALL)

foreach(target ggml-base ggml-cpu)
    target_link_libraries(${target} PRIVATE tq)
    target_include_directories(${target} PRIVATE ggml)
endforeach()
set(HOOK ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_hook.c ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_flash_attn.c
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_set_rows.c)
target_sources(ggml-cpu PRIVATE ${HOOK})
set(GRAPH ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_cache_graph.cpp ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_conditioning.cpp
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_constants.cpp ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_kv_cache.cpp
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_state.cpp)
target_sources(llama PRIVATE ${GRAPH})
target_include_directories(llama PRIVATE ggml tq)
set_source_files_properties(${GRAPH} ${HOOK} TARGET_DIRECTORY llama ggml-cpu PROPERTIES
    COMPILE_OPTIONS "-Wall;-Wextra;$<$<BOOL:${TQ_WERROR}>:-Werror>" SKIP_UNITY_BUILD_INCLUSION ON)

foreach(target ggml-rpc llama-common llama-bench-impl)
    target_include_directories(${target} PRIVATE ggml)
endforeach()
# Two machines can work on one model only where these are the same (tq_rpc.h).
set(agreement ${patches} ${CMAKE_CURRENT_SOURCE_DIR}/tq/tq.h ${CMAKE_CURRENT_SOURCE_DIR}/ggml/tq_flash_attn.h)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${agreement})
set(agreed "")
foreach(source ${agreement})
    file(SHA256 ${source} hash)
    string(APPEND agreed ${hash})
endforeach()
string(SHA256 agreed ${agreed})
string(SUBSTRING ${agreed} 0 4 agreed)
target_compile_definitions(ggml-rpc PRIVATE TQ_RPC_BUILD=0x${agreed})

# No versioned names: a wheel cannot hold symbolic links and would carry each library three times.
set(LLAMA_LIBS llama ggml ggml-base ggml-cpu ggml-rpc)
foreach(target ${LLAMA_LIBS})
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    set_property(TARGET ${target} PROPERTY EXCLUDE_FROM_ALL OFF)
    install(TARGETS ${target} LIBRARY DESTINATION tq_ggml/lib NAMELINK_SKIP)
endforeach()

install(FILES ${LLAMA_TREE}/LICENSE DESTINATION tq_ggml/lib RENAME LICENSE.llama.cpp)

# The proof that the built engine has the types, and the ids that tq_ggml/cache_types.py says.
add_executable(tq-check-types EXCLUDE_FROM_ALL ggml/tq_check_types.c)
target_link_libraries(tq-check-types PRIVATE ggml ggml-base)
execute_process(
    COMMAND ${Python_EXECUTABLE} -c "from tq_ggml.cache_types import CACHE_TYPES
print(*(f'{t.ggml_id}:{t.name}:{t.type_size}' for t in CACHE_TYPES), sep=';', end='')"
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/..
    OUTPUT_VARIABLE cache_types COMMAND_ERROR_IS_FATAL ANY)
add_custom_target(tq-types-checked ALL COMMAND tq-check-types ${cache_types} DEPENDS tq-check-types)

# llama.cpp's own programs; tq_ggml/doctor.py has the same list. What they add to the libraries does no arithmetic that is
# worth the minutes which optimising it takes.
foreach(target llama-common cpp-httplib mtmd server-context llama-server-impl llama-cli-impl)
    target_compile_options(${target} PRIVATE -O1)
endforeach()
add_custom_target(tq-programs DEPENDS llama-server llama-cli llama-bench llama-perplexity ggml-rpc-server)

# llama.cpp's own tests; these are linked with ggml alone.
add_custom_target(tq-llama-tests)
foreach(test test-quantize-fns test-backend-ops)
    add_executable(${test} EXCLUDE_FROM_ALL ${LLAMA_TREE}/tests/${test}.cpp)
    target_link_libraries(${test} PRIVATE ggml ggml-base ggml-cpu)
    add_dependencies(tq-llama-tests ${test})
endforeach()
# This one also writes a tiny model of every architecture.
add_executable(test-llama-archs EXCLUDE_FROM_ALL ${LLAMA_TREE}/tests/test-llama-archs.cpp)
target_link_libraries(test-llama-archs PRIVATE llama-common llama)
target_compile_options(test-llama-archs PRIVATE -O1)
add_dependencies(tq-llama-tests test-llama-archs)

# scripts/bench.py runs it.
add_executable(tq-attn-bench EXCLUDE_FROM_ALL bench/attn_bench.c bench/bench_arguments.c)
target_compile_features(tq-attn-bench PRIVATE c_std_11)
target_compile_options(tq-attn-bench PRIVATE -Wall -Wextra $<$<BOOL:${TQ_WERROR}>:-Werror>)
target_include_directories(tq-attn-bench PRIVATE ggml)
target_link_libraries(tq-attn-bench PRIVATE ggml ggml-base ggml-cpu tq m)
