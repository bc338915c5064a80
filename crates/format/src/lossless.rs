//! The lossless stage over one layer's extent.

use std::cell::RefCell;

use matkv_types::{Codec, KvLayout};
use zstd::bulk::{Compressor, Decompressor};

use crate::error::FormatError;

thread_local! {
    // Contexts of about 100 KiB that would otherwise be built once a layer.
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
    static PLANES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of a layer whose 16-bit elements are split into planes; 0 where elements are bytes.
fn split_bytes(codec: Codec, layout: &KvLayout) -> usize {
    let wide = layout.dtype.bits() == 16;
    if wide && matches!(codec, Codec::SplitLz4 | Codec::SplitZstd) {
        layout.rows_bytes()
    } else {
        0
    }
}

/// Low bytes, then high bytes: in bf16 and fp16 the high ones repeat, the low ones are noise.
fn split(layer: &[u8], bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(layer.len());
    out.extend(layer[..bytes].iter().step_by(2));
    out.extend(layer[..bytes].iter().skip(1).step_by(2));
    out.extend_from_slice(&layer[bytes..]);
    out
}

fn join(planes: &[u8], bytes: usize, out: &mut [u8]) {
    let (low, rest) = planes.split_at(bytes / 2);
    let (high, tail) = rest.split_at(bytes / 2);
    let (elements, end) = out.split_at_mut(bytes);
    for ((o, l), h) in elements.chunks_exact_mut(2).zip(low).zip(high) {
        (o[0], o[1]) = (*l, *h);
    }
    end.copy_from_slice(tail);
}

/// Compresses one layer; the layer itself if that is not smaller.
pub(crate) fn compress(
    layer: &[u8],
    layout: &KvLayout,
    codec: Codec,
    level: i32,
) -> Result<Vec<u8>, FormatError> {
    let planes = match split_bytes(codec, layout) {
        0 => None,
        bytes => Some(split(layer, bytes)),
    };
    let source = planes.as_deref().unwrap_or(layer);
    let small = match codec {
        Codec::None => return Ok(layer.to_vec()),
        Codec::Lz4 | Codec::SplitLz4 => lz4_flex::block::compress(source),
        Codec::Zstd | Codec::SplitZstd => Compressor::new(level)
            .and_then(|mut c| c.compress(source))
            .map_err(|e| FormatError::Codec { codec, reason: e.to_string() })?,
    };
    Ok(if small.len() < layer.len() { small } else { layer.to_vec() })
}

/// Restores one layer into `out`, which has exactly its size.
pub(crate) fn decompress(
    stored: &[u8],
    layout: &KvLayout,
    codec: Codec,
    out: &mut [u8],
) -> Result<(), FormatError> {
    if stored.len() == out.len() {
        out.copy_from_slice(stored);
        return Ok(());
    }
    match split_bytes(codec, layout) {
        0 => expand(stored, codec, out),
        bytes => PLANES.with(|planes| {
            let mut planes = planes.borrow_mut();
            planes.resize(out.len(), 0);
            expand(stored, codec, &mut planes)?;
            join(&planes, bytes, out);
            Ok(())
        }),
    }
}

fn expand(stored: &[u8], codec: Codec, out: &mut [u8]) -> Result<(), FormatError> {
    let fail = |reason: String| FormatError::Codec { codec, reason };
    let len = match codec {
        Codec::None => return Err(fail("an extent is shorter than its layer".into())),
        Codec::Lz4 | Codec::SplitLz4 => {
            lz4_flex::block::decompress_into(stored, out).map_err(|e| fail(e.to_string()))?
        }
        Codec::Zstd | Codec::SplitZstd => DECOMPRESSOR.with(|context| {
            let mut context = context.borrow_mut();
            if context.is_none() {
                *context = Some(Decompressor::new().map_err(|e| fail(e.to_string()))?);
            }
            match context.as_mut() {
                Some(d) => d.decompress_to_buffer(stored, out).map_err(|e| fail(e.to_string())),
                None => Err(fail("no context".into())),
            }
        })?,
    };
    if len == out.len() {
        return Ok(());
    }
    Err(fail(format!("an extent holds {len} bytes, its layer has {}", out.len())))
}
