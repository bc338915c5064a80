//! Sealing a filled slot into a chunk file, and verifying a read one.

use std::ops::Range;

use matkv_types::{ChunkId, Encoding, Fingerprint, KvLayout, KvShape, PAGE_BYTES};

use crate::error::FormatError;
use crate::padding;
use crate::superblock::{LAYERS_MAX, Superblock};

/// What a file must be to be used.
#[derive(Debug, Clone)]
pub struct Expectation<'a> {
    /// Fingerprint of the running model and prefix.
    pub fingerprint: Fingerprint,
    /// The chunk asked for.
    pub chunk_id: ChunkId,
    /// Its token ids.
    pub tokens: &'a [u32],
    /// Shape of the running model.
    pub shape: KvShape,
    /// Prefix length.
    pub base_position: usize,
}

/// A chunk file's bytes, whole, as they lie in a slot and on flash.
pub struct ChunkFile;

impl ChunkFile {
    /// Bytes of a file with these rows.
    pub fn len(shape: KvShape, encoding: Encoding, rows: usize) -> usize {
        Superblock::kv_offset(rows) + KvLayout::new(shape, encoding.dtype, rows).total_bytes()
    }

    /// Where the KV section lies in such a file.
    pub fn kv_range(shape: KvShape, encoding: Encoding, rows: usize) -> Range<usize> {
        Superblock::kv_offset(rows)..Self::len(shape, encoding, rows)
    }

    /// Completes a slot whose KV section has been filled: zeroes padding, writes token ids and
    /// superblock. The first [`Self::len`] bytes are then the file.
    ///
    /// # Errors
    /// If the slot is too small or the model too deep for a superblock.
    pub fn seal(
        slot: &mut [u8],
        expect: &Expectation<'_>,
        encoding: Encoding,
    ) -> Result<Superblock, FormatError> {
        let (rows, shape) = (expect.tokens.len(), expect.shape);
        let len = Self::len(shape, encoding, rows);
        if rows == 0 {
            let (expected, found) = ("at least 1".into(), "0".into());
            return Err(FormatError::Field { field: "rows", expected, found });
        }
        if slot.len() < len {
            return Err(FormatError::Length { expected: len, found: slot.len() });
        }
        if shape.layers > LAYERS_MAX {
            return Err(FormatError::Field {
                field: "layers",
                expected: format!("at most {LAYERS_MAX}"),
                found: shape.layers.to_string(),
            });
        }
        let kv = Superblock::kv_offset(rows);
        let layout = KvLayout::new(shape, encoding.dtype, rows);
        padding::zero(&mut slot[kv..len], &layout);
        slot[PAGE_BYTES..kv].fill(0);
        for (bytes, token) in slot[PAGE_BYTES..kv].chunks_exact_mut(4).zip(expect.tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let superblock = Superblock {
            fingerprint: expect.fingerprint,
            chunk_id: expect.chunk_id,
            encoding,
            shape,
            rows,
            base_position: expect.base_position,
            token_checksum: crc32c::crc32c(&slot[PAGE_BYTES..kv]),
            extent_checksums: slot[kv..len]
                .chunks_exact(layout.layer_stride())
                .map(crc32c::crc32c)
                .collect(),
        };
        slot[..PAGE_BYTES].copy_from_slice(&superblock.encode());
        Ok(superblock)
    }

    /// Verifies every byte of a file that was read into a slot.
    ///
    /// # Errors
    /// The first thing that is wrong. The bytes must then not be used.
    pub fn verify(bytes: &[u8], expect: &Expectation<'_>) -> Result<Superblock, FormatError> {
        let found = Superblock::decode(bytes)?;
        matches("fingerprint", &expect.fingerprint, &found.fingerprint)?;
        matches("chunk id", &expect.chunk_id, &found.chunk_id)?;
        let shape = |s: KvShape| format!("{}×{}×{}", s.layers, s.kv_heads, s.head_dim);
        matches("shape", &shape(expect.shape), &shape(found.shape))?;
        matches("rows", &expect.tokens.len(), &found.rows)?;
        matches("base position", &expect.base_position, &found.base_position)?;
        let len = found.file_len();
        if bytes.len() < len {
            return Err(FormatError::Length { expected: len, found: bytes.len() });
        }
        // The slot may be longer than the file; the file's own length is checked when it is opened.
        let kv = Superblock::kv_offset(found.rows);
        checksum("token ids", found.token_checksum, &bytes[PAGE_BYTES..kv])?;
        let same = bytes[PAGE_BYTES..kv]
            .chunks_exact(4)
            .zip(expect.tokens)
            .all(|(b, token)| b == token.to_le_bytes());
        if !same {
            let (expected, found) = ("the chunk's token ids".into(), "other token ids".into());
            return Err(FormatError::Field { field: "token ids", expected, found });
        }
        let stride = found.layout().layer_stride();
        for (i, extent) in bytes[kv..len].chunks_exact(stride).enumerate() {
            checksum(&format!("layer {i}"), found.extent_checksums[i], extent)?;
        }
        Ok(found)
    }
}

fn matches<T: PartialEq + ToString>(
    field: &'static str,
    expected: &T,
    found: &T,
) -> Result<(), FormatError> {
    if expected == found {
        return Ok(());
    }
    Err(FormatError::Field { field, expected: expected.to_string(), found: found.to_string() })
}

fn checksum(what: &str, expected: u32, bytes: &[u8]) -> Result<(), FormatError> {
    let found = crc32c::crc32c(bytes);
    if expected == found {
        return Ok(());
    }
    Err(FormatError::Checksum { what: what.to_owned(), expected, found })
}
