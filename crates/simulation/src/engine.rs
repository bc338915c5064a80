//! A model that is nothing but the bytes it reads: its next token is a hash of every row a
//! sequence attends to, so a wrong byte anywhere is another answer.

use matkv_decoder_core::Engine;
use matkv_model::{Detokenizer, Source, Step};
use matkv_types::{KvLayout, KvShape};

use crate::random::mix;

pub(crate) const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 1, head_dim: 32 };
const VOCAB: usize = 64;
/// One answer token in 64 ends it.
pub(crate) const END: u32 = 0;
/// Bytes of the own section a row is written to.
const ROW: usize = 8;

pub(crate) struct HashEngine;

fn write_row(own: &mut [u8], row: usize, value: u64) {
    own[row * ROW..(row + 1) * ROW].copy_from_slice(&value.to_le_bytes());
}

fn read_row(own: &[u8], row: usize) -> u64 {
    u64::from_le_bytes(own[row * ROW..(row + 1) * ROW].try_into().unwrap_or_default())
}

/// A chunk's section as one number.
fn section(bytes: &[u8], layout: KvLayout) -> u64 {
    u64::from(crc32c::crc32c(&bytes[..layout.total_bytes()]))
}

fn logits(step: &mut Step<'_>) -> Vec<f32> {
    let mut hash = 1;
    // A row, too, follows from all that lies before it.
    let mut rows = step.rows.iter().peekable();
    for s in step.segments {
        hash = mix(hash ^ s.position as u64 ^ (s.shift as u64) << 20);
        match s.source {
            Source::Own => {
                for row in s.first_row..s.first_row + s.rows {
                    if let Some(new) = rows.next_if(|r| r.row == row) {
                        let token = u64::from(new.token) << 32 | new.position as u64;
                        write_row(step.own, row, mix(hash ^ mix(token)));
                    }
                    hash = mix(hash ^ read_row(step.own, row));
                }
            }
            Source::Slot(bytes, layout) => {
                let rows = (s.first_row as u64) << 32 | s.rows as u64;
                hash = mix(hash ^ section(bytes, layout) ^ mix(rows));
            }
            Source::Layers(..) => unreachable!("the engine is given whole chunks"),
        }
    }
    let mut out = vec![0.0; VOCAB];
    out[hash as usize % VOCAB] = 1.0;
    out
}

impl HashEngine {
    /// Logits of one step.
    pub(crate) fn step(&self, mut step: Step<'_>) -> Vec<f32> {
        logits(&mut step)
    }
}

impl Engine for HashEngine {
    fn kv_shape(&self) -> KvShape {
        SHAPE
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn end_tokens(&self) -> &[u32] {
        &[END]
    }

    fn text(&self, _: &mut Detokenizer, _: u32) -> String {
        String::new()
    }

    fn forward(
        &self,
        steps: &mut [Step<'_>],
        go_on: &mut dyn FnMut() -> bool,
        out: &mut Vec<Vec<f32>>,
    ) -> bool {
        out.clear();
        let goes_on = go_on();
        if goes_on {
            out.extend(steps.iter_mut().map(logits));
        }
        goes_on
    }
}
