//! Cutting a document's token ids into windows.

use std::ops::Range;

/// Why a chunker cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("chunk_overlap {overlap} must be smaller than chunk_size {size}, which must be at least 1")]
pub struct ChunkerError {
    size: usize,
    overlap: usize,
}

/// Windows of `size` tokens, each sharing `overlap` with the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunker {
    size: usize,
    overlap: usize,
}

impl Chunker {
    /// A chunker.
    ///
    /// # Errors
    /// If the windows would not advance.
    pub fn new(size: usize, overlap: usize) -> Result<Self, ChunkerError> {
        if size == 0 || overlap >= size {
            return Err(ChunkerError { size, overlap });
        }
        Ok(Self { size, overlap })
    }

    /// Windows over `tokens` ids. The tail is a window too, however short; every token is in one.
    pub fn windows(&self, tokens: usize) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        let mut start = 0;
        while start < tokens {
            let end = (start + self.size).min(tokens);
            out.push(start..end);
            if end == tokens {
                break;
            }
            start = end - self.overlap;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn around_every_boundary() {
        let chunker = Chunker::new(4, 0).unwrap();
        assert!(chunker.windows(0).is_empty());
        assert_eq!(chunker.windows(1), vec![0..1]);
        assert_eq!(chunker.windows(4), vec![0..4]);
        assert_eq!(chunker.windows(5), [0..4, 4..5]);
        assert_eq!(chunker.windows(8), [0..4, 4..8]);
    }

    #[test]
    fn overlap_covers_and_advances() {
        assert!(Chunker::new(4, 4).is_err() && Chunker::new(0, 0).is_err());
        for overlap in 0..4 {
            let chunker = Chunker::new(4, overlap).unwrap();
            for tokens in 1..40 {
                let windows = chunker.windows(tokens);
                assert_eq!((windows[0].start, windows.last().unwrap().end), (0, tokens));
                for pair in windows.windows(2) {
                    assert_eq!(pair[0].end - pair[1].start, overlap);
                    assert!(pair[1].end > pair[0].end);
                }
            }
        }
    }
}
