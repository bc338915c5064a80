//! Reading a GGUF file: metadata by key, tensors dequantized to f32 by candle.

use std::fs::File;
use std::io::BufReader;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use matkv_kernels::QuantKind;

use crate::error::{ModelError, Result};

/// An open GGUF file.
pub(crate) struct Gguf {
    path: PathBuf,
    content: Content,
    reader: BufReader<File>,
}

impl Gguf {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path)
            .map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        let mut reader = BufReader::with_capacity(1 << 20, file);
        // candle divides by the alignment the file names, which may be zero.
        let read = AssertUnwindSafe(|| Content::read(&mut reader).map_err(|e| reason(&e)));
        let content = catch_unwind(read)
            .unwrap_or_else(|_| Err("its header makes the reader panic".into()))
            .map_err(|reason| ModelError::Gguf { path: path.to_owned(), reason })?;
        Ok(Self { path: path.to_owned(), content, reader })
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.content.metadata.keys().map(String::as_str)
    }

    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.content.tensor_infos.keys().map(String::as_str)
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// An unsigned integer of any width, if the key exists.
    pub(crate) fn uint(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let n = match value {
            Value::U8(n) => u64::from(*n),
            Value::U16(n) => u64::from(*n),
            Value::U32(n) => u64::from(*n),
            Value::U64(n) => *n,
            Value::I32(n) if *n >= 0 => *n as u64,
            Value::I64(n) if *n >= 0 => *n as u64,
            other => return Err(metadata(key, format!("expected an unsigned integer: {other:?}"))),
        };
        Ok(Some(n as usize))
    }

    pub(crate) fn require_uint(&self, key: &str) -> Result<usize> {
        self.uint(key)?.ok_or_else(|| metadata(key, "missing"))
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::F32(x)) => Ok(Some(f64::from(*x))),
            Some(Value::F64(x)) => Ok(Some(*x)),
            Some(other) => Err(metadata(key, format!("expected a number: {other:?}"))),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(|v| v.to_string().ok()).map(String::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        self.value(key).and_then(|v| v.to_bool().ok())
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Vec<String>> {
        let list = self.list(key)?;
        list.iter()
            .map(|v| v.to_string().cloned().map_err(|e| metadata(key, e.to_string())))
            .collect()
    }

    pub(crate) fn floats(&self, key: &str) -> Result<Vec<f32>> {
        let list = self.list(key)?;
        list.iter().map(|v| v.to_f32().map_err(|e| metadata(key, e.to_string()))).collect()
    }

    /// Integers of any signedness.
    pub(crate) fn ints(&self, key: &str) -> Result<Vec<i64>> {
        let list = self.list(key)?;
        list.iter()
            .map(|v| match v {
                Value::I32(n) => Ok(i64::from(*n)),
                Value::U32(n) => Ok(i64::from(*n)),
                other => Err(metadata(key, format!("expected integers: {other:?}"))),
            })
            .collect()
    }

    fn list(&self, key: &str) -> Result<&Vec<Value>> {
        let value = self.value(key).ok_or_else(|| metadata(key, "missing"))?;
        value.to_vec().map_err(|e| metadata(key, e.to_string()))
    }

    fn read(&mut self, name: &str, dims: &[usize]) -> Result<QTensor> {
        let err = |reason: String| ModelError::Tensor { name: name.to_owned(), reason };
        let tensor = self
            .content
            .tensor(&mut self.reader, name, &Device::Cpu)
            .map_err(|e| err(format!("{} (in {})", reason(&e), self.path.display())))?;
        if tensor.shape().dims() != dims {
            return Err(err(format!("expected {dims:?}, found {:?}", tensor.shape().dims())));
        }
        Ok(tensor)
    }

    /// How a tensor's weights are written, if the kernels multiply them as they are.
    pub(crate) fn quant_kind(&self, name: &str) -> Option<QuantKind> {
        match self.content.tensor_infos.get(name)?.ggml_dtype {
            GgmlDType::Q4_0 => Some(QuantKind::Q4_0),
            GgmlDType::Q4_1 => Some(QuantKind::Q4_1),
            GgmlDType::Q8_0 => Some(QuantKind::Q8_0),
            _ => None,
        }
    }

    /// A tensor's blocks as they are in the file, with its dimensions checked.
    pub(crate) fn blocks(&mut self, name: &str, dims: &[usize]) -> Result<Vec<u8>> {
        let tensor = self.read(name, dims)?;
        let bytes = tensor
            .data()
            .map_err(|e| ModelError::Tensor { name: name.to_owned(), reason: reason(&e) })?;
        Ok(bytes.into_owned())
    }

    /// A tensor as row-major f32, with its dimensions checked.
    pub(crate) fn tensor(&mut self, name: &str, dims: &[usize]) -> Result<Vec<f32>> {
        let err = |reason: String| ModelError::Tensor { name: name.to_owned(), reason };
        let tensor = self.read(name, dims)?;
        let dense = tensor.dequantize(&Device::Cpu).map_err(|e| err(reason(&e)))?;
        dense.flatten_all().and_then(|t| t.to_vec1::<f32>()).map_err(|e| err(reason(&e)))
    }
}

/// candle's own words, without the backtrace it appends when RUST_BACKTRACE is set.
fn reason(e: &candle_core::Error) -> String {
    e.to_string().lines().next().unwrap_or_default().to_owned()
}

pub(crate) fn metadata(key: &str, reason: impl Into<String>) -> ModelError {
    ModelError::Metadata { key: key.to_owned(), reason: reason.into() }
}
