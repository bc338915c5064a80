//! Writing chunk files from rows, verifying read ones, and changing their encoding.

use std::cell::RefCell;
use std::ops::Range;

use matkv_types::{
    ChunkId, Codec, Encoding, Fingerprint, KvDtype, KvLayout, KvShape, PAGE_BYTES, align_up,
};

use crate::error::FormatError;
use crate::superblock::{EXTENT_ALIGN, LAYERS_MAX, Superblock};
use crate::{lossless, padding, quantize};

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
    /// Bytes of an uncompressed file with these rows.
    pub fn len(shape: KvShape, dtype: KvDtype, rows: usize) -> usize {
        Superblock::kv_offset(rows) + KvLayout::new(shape, dtype, rows).total_bytes()
    }

    /// Where the KV section lies in an uncompressed file.
    pub fn kv_range(shape: KvShape, dtype: KvDtype, rows: usize) -> Range<usize> {
        Superblock::kv_offset(rows)..Self::len(shape, dtype, rows)
    }

    /// Completes a slot whose KV section holds bf16 rows: zeroes padding, writes token ids and
    /// superblock. The first [`Self::len`] bytes are then the file.
    ///
    /// # Errors
    /// If the slot is too small or the model too deep for a superblock.
    pub fn seal(slot: &mut [u8], expect: &Expectation<'_>) -> Result<Superblock, FormatError> {
        let layout = layout(slot.len(), expect, KvDtype::Bf16)?;
        let kv = Self::kv_range(expect.shape, KvDtype::Bf16, layout.rows);
        padding::zero(&mut slot[kv], &layout);
        Ok(finish(slot, expect, &layout))
    }

    /// Writes an uncompressed file of another row type from a KV section of bf16 rows, whose
    /// padding it zeroes.
    ///
    /// # Errors
    /// As [`Self::seal`].
    pub fn encode(
        rows: &mut [u8],
        out: &mut [u8],
        expect: &Expectation<'_>,
        dtype: KvDtype,
    ) -> Result<Superblock, FormatError> {
        Self::encode_with(rows, out, expect, dtype, |kv, stride, encode| {
            kv.chunks_exact_mut(stride).enumerate().for_each(|(i, layer)| encode(i, layer));
        })
    }

    /// The same; `for_each_layer` gets the KV section, the bytes of a layer, and what is to be done
    /// with each layer and its number, in any order and on any thread.
    ///
    /// # Errors
    /// As [`Self::seal`].
    pub fn encode_with(
        rows: &mut [u8],
        out: &mut [u8],
        expect: &Expectation<'_>,
        dtype: KvDtype,
        for_each_layer: impl FnOnce(&mut [u8], usize, &(dyn Fn(usize, &mut [u8]) + Sync)),
    ) -> Result<Superblock, FormatError> {
        let to = layout(out.len(), expect, dtype)?;
        let from = KvLayout::new(expect.shape, KvDtype::Bf16, to.rows);
        if rows.len() != from.total_bytes() {
            return Err(FormatError::Length { expected: from.total_bytes(), found: rows.len() });
        }
        padding::zero(rows, &from);
        let kv = Self::kv_range(expect.shape, dtype, to.rows);
        if dtype == KvDtype::Bf16 {
            out[kv].copy_from_slice(rows);
        } else {
            let (rows, stride) = (&*rows, from.layer_stride());
            for_each_layer(&mut out[kv], to.layer_stride(), &|i, target| {
                quantize::encode_layer(&rows[i * stride..(i + 1) * stride], target, &to);
            });
        }
        Ok(finish(out, expect, &to))
    }

    /// A compressed twin of an uncompressed file, padded to whole pages.
    ///
    /// # Errors
    /// If the codec fails, or the file is compressed already or shorter than it says.
    pub fn compress(
        file: &[u8],
        found: &Superblock,
        codec: Codec,
        level: i32,
    ) -> Result<Vec<u8>, FormatError> {
        let len = found.file_len();
        if found.encoding.codec != Codec::None || file.len() < len {
            return Err(FormatError::Length { expected: len, found: file.len() });
        }
        let kv = Superblock::kv_offset(found.rows);
        let mut out = file[..kv].to_vec();
        let mut superblock = found.clone();
        superblock.encoding.codec = codec;
        superblock.extent_checksums.clear();
        superblock.extent_bytes.clear();
        for extent in found.extents() {
            let stored = lossless::compress(&file[extent], &found.layout(), codec, level)?;
            superblock.extent_checksums.push(crc32c::crc32c(&stored));
            superblock.extent_bytes.push(stored.len() as u32);
            out.resize(align_up(out.len(), EXTENT_ALIGN), 0);
            out.extend_from_slice(&stored);
        }
        out.resize(align_up(out.len(), PAGE_BYTES), 0);
        if codec == Codec::None {
            out.truncate(len);
        }
        out[..PAGE_BYTES].copy_from_slice(&superblock.encode());
        Ok(out)
    }

    /// Writes one layer of a verified file in its arena form.
    ///
    /// # Errors
    /// If the codec cannot restore it.
    ///
    /// # Panics
    /// If `target` is not one layer of the arena form.
    pub fn restore_layer(
        file: &[u8],
        found: &Superblock,
        layer: usize,
        target: &mut [u8],
    ) -> Result<(), FormatError> {
        let Some(extent) = found.extents().nth(layer) else { return Ok(()) };
        let (stored, codec, from) = (&file[extent], found.encoding.codec, found.layout());
        if found.encoding.dtype.in_arena() == found.encoding.dtype {
            return lossless::decompress(stored, &from, codec, target);
        }
        SCRATCH.with(|scratch| {
            let mut scratch = scratch.borrow_mut();
            scratch.resize(from.layer_stride(), 0);
            lossless::decompress(stored, &from, codec, &mut scratch)?;
            quantize::decode_layer(&scratch, &from, target);
            Ok(())
        })
    }

    /// The same chunk in another encoding. Only rows of a narrower type lose anything.
    ///
    /// # Errors
    /// If the file cannot be restored or the codec fails.
    pub fn transcode(
        file: &[u8],
        found: &Superblock,
        expect: &Expectation<'_>,
        to: Encoding,
        level: i32,
    ) -> Result<Vec<u8>, FormatError> {
        let from = found.layout();
        let mut image = vec![0; Self::len(found.shape, to.dtype, found.rows)];
        let kv = Self::kv_range(found.shape, to.dtype, found.rows);
        let mut layer = vec![0; from.layer_stride()];
        let target = KvLayout::new(found.shape, to.dtype, found.rows);
        let wide = KvLayout::new(found.shape, KvDtype::Bf16, found.rows);
        let mut rows = vec![0; wide.layer_stride()];
        let layers = image[kv].chunks_exact_mut(target.layer_stride());
        for (extent, out) in found.extents().zip(layers) {
            lossless::decompress(&file[extent], &from, found.encoding.codec, &mut layer)?;
            if to.dtype == from.dtype {
                out.copy_from_slice(&layer);
                continue;
            }
            if from.dtype == KvDtype::Bf16 {
                rows.copy_from_slice(&layer);
            } else {
                quantize::decode_layer(&layer, &from, &mut rows);
            }
            if to.dtype == KvDtype::Bf16 {
                out.copy_from_slice(&rows);
            } else {
                quantize::encode_layer(&rows, out, &target);
            }
        }
        let sealed = finish(&mut image, expect, &target);
        Self::compress(&image, &sealed, to.codec, level)
    }

    /// Verifies every byte of a file that was read into a slot.
    ///
    /// # Errors
    /// The first thing that is wrong. The bytes must then not be used.
    pub fn verify(bytes: &[u8], expect: &Expectation<'_>) -> Result<Superblock, FormatError> {
        let found = Self::verify_head(bytes, expect)?;
        // The slot may be longer than the file; the file's own length is checked when it is opened.
        if bytes.len() < found.file_len() {
            let expected = found.file_len();
            return Err(FormatError::Length { expected, found: bytes.len() });
        }
        for layer in 0..found.shape.layers {
            Self::verify_layer(bytes, &found, layer)?;
        }
        Self::verify_tail(bytes, &found)?;
        Ok(found)
    }

    /// Verifies what precedes the rows. `bytes` are the file as far as it is there: at least up to
    /// [`Superblock::kv_offset`].
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn verify_head(bytes: &[u8], expect: &Expectation<'_>) -> Result<Superblock, FormatError> {
        let found = Superblock::decode(bytes)?;
        matches("fingerprint", &expect.fingerprint, &found.fingerprint)?;
        matches("chunk id", &expect.chunk_id, &found.chunk_id)?;
        let shape = |s: KvShape| format!("{}×{}×{}", s.layers, s.kv_heads, s.head_dim);
        matches("shape", &shape(expect.shape), &shape(found.shape))?;
        matches("rows", &expect.tokens.len(), &found.rows)?;
        matches("base position", &expect.base_position, &found.base_position)?;
        let kv = Superblock::kv_offset(found.rows);
        if bytes.len() < kv {
            return Err(FormatError::Length { expected: kv, found: bytes.len() });
        }
        checksum("token ids", found.token_checksum, &bytes[PAGE_BYTES..kv])?;
        let same = bytes[PAGE_BYTES..kv]
            .chunks_exact(4)
            .zip(expect.tokens)
            .all(|(b, token)| b == token.to_le_bytes());
        if !same {
            let (expected, found) = ("the chunk's token ids".into(), "other token ids".into());
            return Err(FormatError::Field { field: "token ids", expected, found });
        }
        Ok(found)
    }

    /// Verifies one layer as stored, and that nothing lies between it and what precedes it.
    /// `bytes` are the file at least up to the layer's end.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn verify_layer(bytes: &[u8], found: &Superblock, layer: usize) -> Result<(), FormatError> {
        let mut extents = found.extents().skip(layer.saturating_sub(1));
        let kv = Superblock::kv_offset(found.rows);
        let before = if layer == 0 { kv } else { extents.next().map_or(kv, |e| e.end) };
        let Some(extent) = extents.next() else { return Ok(()) };
        if bytes.len() < extent.end {
            return Err(FormatError::Length { expected: extent.end, found: bytes.len() });
        }
        zeros(&bytes[before..extent.start])?;
        let sum = crc32c::crc32c(&bytes[extent]);
        if sum == found.extent_checksums[layer] {
            return Ok(());
        }
        let (what, expected) = (format!("layer {layer}"), found.extent_checksums[layer]);
        Err(FormatError::Checksum { what, expected, found: sum })
    }

    /// Verifies what follows the last layer.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn verify_tail(bytes: &[u8], found: &Superblock) -> Result<(), FormatError> {
        let end = found.extents().last().map_or(Superblock::kv_offset(found.rows), |e| e.end);
        match bytes.get(end..found.file_len()) {
            Some(tail) => zeros(tail),
            None => Err(FormatError::Length { expected: found.file_len(), found: bytes.len() }),
        }
    }
}

/// What lies between extents is defined too.
fn zeros(bytes: &[u8]) -> Result<(), FormatError> {
    if bytes.iter().all(|b| *b == 0) {
        return Ok(());
    }
    let (expected, found) = ("zero".to_owned(), "something else".to_owned());
    Err(FormatError::Field { field: "bytes between extents", expected, found })
}

/// The layout of a file that is about to be written.
fn layout(have: usize, expect: &Expectation<'_>, dtype: KvDtype) -> Result<KvLayout, FormatError> {
    let (rows, shape) = (expect.tokens.len(), expect.shape);
    let len = ChunkFile::len(shape, dtype, rows);
    if rows == 0 {
        let (expected, found) = ("at least 1".into(), "0".into());
        return Err(FormatError::Field { field: "rows", expected, found });
    }
    if have < len {
        return Err(FormatError::Length { expected: len, found: have });
    }
    if shape.layers > LAYERS_MAX {
        return Err(FormatError::Field {
            field: "layers",
            expected: format!("at most {LAYERS_MAX}"),
            found: shape.layers.to_string(),
        });
    }
    Ok(KvLayout::new(shape, dtype, rows))
}

/// Token ids and superblock of a file whose KV section is complete.
fn finish(file: &mut [u8], expect: &Expectation<'_>, layout: &KvLayout) -> Superblock {
    let kv = Superblock::kv_offset(layout.rows);
    file[PAGE_BYTES..kv].fill(0);
    for (bytes, token) in file[PAGE_BYTES..kv].chunks_exact_mut(4).zip(expect.tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    let layers = file[kv..kv + layout.total_bytes()].chunks_exact(layout.layer_stride());
    let superblock = Superblock {
        fingerprint: expect.fingerprint,
        chunk_id: expect.chunk_id,
        encoding: Encoding::new(layout.dtype, Codec::None),
        shape: layout.shape,
        rows: layout.rows,
        base_position: expect.base_position,
        token_checksum: crc32c::crc32c(&file[PAGE_BYTES..kv]),
        extent_checksums: layers.map(crc32c::crc32c).collect(),
        extent_bytes: vec![layout.layer_stride() as u32; layout.shape.layers],
    };
    file[..PAGE_BYTES].copy_from_slice(&superblock.encode());
    superblock
}

thread_local! {
    /// One layer at rest, on its way to the arena.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
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
