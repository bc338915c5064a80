//! Jobs of one step beside each other, and query rows at the ends of what bytes can hold.

mod common;

use common::{Case, Seg, rng, section, tolerance, vector};
use matkv_kernels::{
    ActivationsMut, Attention, AttentionJob, Isa, LayerInput, RopeStyle, RotaryEmbedding, Section,
    SegmentView, team::Team,
};
use matkv_types::{KvDtype, KvLayout, KvShape, Precision};

const HEADS: usize = 6;
const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 32 };

/// A job over some of the sections, and its queries, the same for every segment.
struct Asked {
    sections: Vec<usize>,
    rows: usize,
    queries: Vec<Vec<f32>>,
}

fn attention_job<'a>(asked: &Asked, sections: &'a [(Vec<u8>, KvLayout)]) -> AttentionJob<'a> {
    let mut position = 0;
    let mut segments = Vec::new();
    for &s in &asked.sections {
        let (bytes, layout) = &sections[s];
        let (layout, rows) = (*layout, layout.rows);
        let section = Section::Whole(bytes);
        segments.push(SegmentView { section, layout, first_row: 0, rows, position, rotation: 0 });
        position += rows;
    }
    AttentionJob { segments, positions: (position..position + asked.rows).collect() }
}

/// Both layers of some jobs, computed with one plan.
fn layers(precision: Precision, asked: &[&Asked], sections: &[(Vec<u8>, KvLayout)]) -> Vec<u32> {
    let jobs = asked.iter().map(|a| attention_job(a, sections));
    let mut attention = Attention::new(Isa::detect(), precision, HEADS, jobs);
    let rows: usize = asked.iter().map(|a| a.rows).sum();
    let mut both = vec![Vec::new(); asked.len()];
    for layer in 0..SHAPE.layers {
        let mut out = vec![f32::NAN; rows * HEADS * SHAPE.head_dim];
        let input = |job: usize| LayerInput { own: &[], queries: &asked[job].queries };
        attention.run(layer, input, ActivationsMut::F32(&mut out));
        let mut rest = &out[..];
        for (a, both) in asked.iter().zip(&mut both) {
            let (own, others) = rest.split_at(a.rows * HEADS * SHAPE.head_dim);
            both.extend(own.iter().map(|x| x.to_bits()));
            rest = others;
        }
    }
    both.concat()
}

/// Jobs that see the same blocks, one of them twice, and one of many rows, in every order of
/// threads: each is what it is alone.
#[test]
fn jobs_together_are_those_alone() {
    let mut r = rng(21);
    let one = Team::new(1, "one").unwrap();
    let three = Team::new(3, "three").unwrap();
    for dtype in [KvDtype::Int8, KvDtype::Bf16] {
        let sections = [600, 300]
            .map(|rows| section(&mut r, SHAPE, dtype, rows))
            .into_iter()
            .collect::<Vec<_>>();
        let asked: Vec<Asked> =
            [(vec![0, 1, 0], 1), (vec![0, 1], 3), (vec![1, 0], 20), (vec![1], 2)]
                .into_iter()
                .map(|(sections, rows)| {
                    let queries = vec![vector(&mut r, rows * HEADS * SHAPE.head_dim)];
                    Asked { sections, rows, queries }
                })
                .collect();
        let all: Vec<&Asked> = asked.iter().collect();
        for precision in Precision::ALL {
            let alone: Vec<u32> = one.install(|| {
                asked.iter().flat_map(|a| layers(precision, &[a], &sections)).collect()
            });
            for _ in 0..20 {
                let together = three.install(|| layers(precision, &all, &sections));
                assert!(together == alone, "{dtype:?} {precision}");
            }
        }
    }
}

/// One head of the most dimensions; queries of one sign, of one element, of nothing, and halfway
/// between steps.
#[test]
fn extreme_queries_are_the_same_everywhere() {
    let mut r = rng(22);
    let dim = 256;
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: dim };
    let rope = RotaryEmbedding::plain(dim, 10_000.0, RopeStyle::Interleaved);
    let mut q: Vec<f32> = Vec::new();
    q.extend(std::iter::repeat_n(0.0, dim));
    q.extend(vector(&mut r, dim).iter().map(|x| x.abs()));
    q.extend(vector(&mut r, dim).iter().map(|x| -x.abs()));
    q.extend((0..dim).map(|d| if d == 17 { 1.0 } else { 0.0 }));
    q.extend((0..dim).map(|d| if d == 17 { -1.0 } else { 1e-3 }));
    q.extend((0..dim).map(|d| (d as f32 - 126.5) / 127.0));
    q.extend(std::iter::repeat_n(1e-35, dim));
    let rows = q.len() / dim;
    for extreme in [false, true] {
        let (mut bytes, layout) = section(&mut r, shape, KvDtype::Int8, 300);
        if extreme {
            // −128 is what no encoder writes, and groups may be all zeros.
            bytes[..layout.rows_bytes()].fill(0x80);
            let zeros = layout.k_scale_offset(0, 0);
            bytes[zeros..zeros + 2 * dim].fill(0);
        }
        // Positions of rotation 0: queries stay what they are.
        let seg = Seg { bytes, layout, first_row: 0, rows: 300, position: 0, shift: 299 };
        let case = Case {
            heads: 1,
            layer: 0,
            rope: rope.clone(),
            segs: vec![seg],
            positions: vec![299; rows],
            q: q.clone(),
        };
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let got = case.run(isa, Precision::Bf16);
            let error = case.error(isa, Precision::Bf16);
            let bound = tolerance(Precision::Bf16, KvDtype::Int8);
            assert!(error < bound, "{} {extreme}: {error}", isa.name());
            let bits: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
            assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{}", isa.name());
        }
    }
}
