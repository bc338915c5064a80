//! The encoder's table of words, read from its file row by row: half of the model, of which a text
//! needs a few hundred rows. What was read lies in the page cache, which gives it up when memory
//! is needed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use candle_core::safetensors::SliceSafetensors;
use candle_core::{DType, Error, Result};

/// Rows of f32 in a file.
pub(crate) struct WordTable {
    file: File,
    first: u64,
    rows: usize,
    width: usize,
}

impl WordTable {
    /// Finds a tensor of the file at `path`, whose content is `bytes`.
    pub fn find(
        path: &Path,
        bytes: &[u8],
        tensors: &SliceSafetensors<'_>,
        name: &str,
    ) -> Result<Self> {
        let view = tensors.get(name)?;
        let &[rows, width] = view.shape() else {
            return Err(Error::Msg(format!("tensor {name:?} is no matrix")));
        };
        if DType::try_from(view.dtype())? != DType::F32 {
            return Err(Error::Msg(format!("tensor {name:?} is not of f32")));
        }
        // The view is a part of `bytes`.
        let first = view.data().as_ptr().addr() - bytes.as_ptr().addr();
        Ok(Self { file: File::open(path)?, first: first as u64, rows, width })
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The rows of these words, one below the other.
    pub fn select(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut row = vec![0; 4 * self.width];
        let mut values = Vec::with_capacity(ids.len() * self.width);
        for &id in ids {
            if id as usize >= self.rows {
                return Err(Error::Msg(format!("word {id} of {}", self.rows)));
            }
            let at = self.first + u64::from(id) * row.len() as u64;
            self.file.read_exact_at(&mut row, at)?;
            let numbers = row.as_chunks().0.iter();
            values.extend(numbers.map(|n| f32::from_le_bytes(*n)));
        }
        Ok(values)
    }
}
