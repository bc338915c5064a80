//! What rounding costs in answers: the divergence of next-token distributions from the exact ones
//! over a text, the model reading it token by token; with bf16 products, as prefill has them; with
//! a file's own weights, as decoding has them; and as a system with default settings has it all:
//! the first half prefilled and stored as int8 rows, the other decoded over them.
//! `cargo bench --bench precision -- MODEL.gguf TEXT`.

use matkv_format::{ChunkFile, Expectation};
use matkv_model::{
    ForwardRow, LanguageModel, Phase, Segment, Source, Step, divergence, greedy, log_sum_exp,
};
use matkv_types::{ChunkId, Digest, Fingerprint, KvDtype, KvLayout, Precision};

/// Tokens of the text that are read.
const TOKENS: usize = 600;

/// Logits after every token, read one by one over what is stored of those before.
fn read(model: &LanguageModel, stored: Option<(&[u8], KvLayout)>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let own_layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, tokens.len());
    let mut own = vec![0; own_layout.total_bytes()];
    let before = stored.map_or(0, |(_, layout)| layout.rows);
    let run = |source, rows, position| Segment { source, first_row: 0, rows, position, shift: 0 };
    let mut logits = Vec::new();
    for (i, &token) in tokens.iter().enumerate() {
        let rows = [ForwardRow { token, position: before + i, row: i }];
        let stored = stored.map(|(bytes, layout)| run(Source::Slot(bytes, layout), before, 0));
        let segments: Vec<_> =
            stored.into_iter().chain([run(Source::Own, i + 1, before)]).collect();
        let step =
            Step { rows: &rows, segments: &segments, own: &mut own, own_layout, logits: true };
        logits.append(&mut model.forward(&mut [step]));
    }
    logits
}

/// A chunk file of int8 rows, and where they lie in it.
fn store(model: &LanguageModel, tokens: &[u32]) -> (Vec<u8>, std::ops::Range<usize>) {
    let shape = model.kv_shape();
    let own_layout = KvLayout::new(shape, KvDtype::Bf16, tokens.len());
    let mut own = vec![0; own_layout.total_bytes()];
    let row = |(i, &token)| ForwardRow { token, position: i, row: i };
    let rows: Vec<_> = tokens.iter().enumerate().map(row).collect();
    let segments =
        [Segment { source: Source::Own, first_row: 0, rows: rows.len(), position: 0, shift: 0 }];
    let step = Step { rows: &rows, segments: &segments, own: &mut own, own_layout, logits: false };
    model.forward(&mut [step]);
    let expect = Expectation {
        fingerprint: Fingerprint(Digest([0; 32])),
        chunk_id: ChunkId(Digest([0; 32])),
        tokens,
        shape,
        base_position: 0,
    };
    let mut file = vec![0; ChunkFile::len(shape, KvDtype::Int8, tokens.len())];
    ChunkFile::encode(&mut own, &mut file, &expect, KvDtype::Int8).expect("the rows are encoded");
    (file, ChunkFile::kv_range(shape, KvDtype::Int8, tokens.len()))
}

fn compare(what: &str, exact: &[Vec<f32>], rows: &[Vec<f32>], next: &[u32]) {
    let pairs = || exact.iter().zip(rows);
    let divergences: Vec<f64> = pairs().map(|(p, q)| divergence(p, q)).collect();
    let same = pairs().filter(|(p, q)| greedy(p) == greedy(q)).count();
    println!(
        "{what}: KL(exact || it) {:.6} nats a token on average, {:.6} at most; the same first \
         choice {same} of {} times; loss {:.5} against {:.5}",
        divergences.iter().sum::<f64>() / divergences.len() as f64,
        divergences.iter().copied().fold(0.0, f64::max),
        divergences.len(),
        loss(rows, next),
        loss(exact, next),
    );
}

/// Of the tokens that come next, as far as there are any.
fn loss(rows: &[Vec<f32>], next: &[u32]) -> f64 {
    let term = |(x, &next): (&Vec<f32>, &u32)| log_sum_exp(x) - f64::from(x[next as usize]);
    rows.iter().zip(next).map(term).sum::<f64>() / next.len() as f64
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let [model, text] = &args[..] else {
        println!("skipped: give the paths of a .gguf file and of a text");
        return;
    };
    let text = std::fs::read_to_string(text).expect("the text is readable");
    let open = |precision, phase| {
        LanguageModel::open_for(model.as_ref(), None, precision, phase).expect("the model opens")
    };
    let model = open(Precision::Exact, Phase::Prefill);
    let mut tokens = model.tokenizer.encode(&text).expect("the text has tokens");
    tokens.truncate(TOKENS);
    let exact = read(&model, None, &tokens);
    let prefill = open(Precision::Bf16, Phase::Prefill);
    compare("bf16 products", &exact, &read(&prefill, None, &tokens), &tokens[1..]);
    let decode = open(Precision::Bf16, Phase::Decode);
    compare("the file's weights", &exact, &read(&decode, None, &tokens), &tokens[1..]);
    let (first, second) = tokens.split_at(tokens.len() / 2);
    let (file, rows) = store(&prefill, first);
    let stored = (&file[rows], KvLayout::new(prefill.kv_shape(), KvDtype::Int8, first.len()));
    let rows = read(&decode, Some(stored), second);
    compare("all of it, over int8 rows", &exact[first.len()..], &rows, &second[1..]);
}
