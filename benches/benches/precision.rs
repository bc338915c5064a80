//! What rounding costs in answers: the divergence of next-token distributions from the exact ones
//! over a text, the model reading it token by token; with bf16 products, as prefill has them, and
//! with a file's own weights, as decoding has them.
//! `cargo bench --bench precision -- MODEL.gguf TEXT`.

use matkv_model::{
    ForwardRow, LanguageModel, Phase, Segment, Source, Step, divergence, greedy, log_sum_exp,
};
use matkv_types::{KvDtype, KvLayout, Precision};

/// Tokens of the text that are read.
const TOKENS: usize = 600;

/// Logits after every token.
fn read(model: &LanguageModel, tokens: &[u32]) -> Vec<Vec<f32>> {
    let own_layout = KvLayout::new(model.kv_shape(), KvDtype::Bf16, tokens.len());
    let mut own = vec![0; own_layout.total_bytes()];
    let mut logits = Vec::new();
    for (i, &token) in tokens.iter().enumerate() {
        let rows = [ForwardRow { token, position: i, row: i }];
        let segments =
            [Segment { source: Source::Own, first_row: 0, rows: i + 1, position: 0, shift: 0 }];
        let step =
            Step { rows: &rows, segments: &segments, own: &mut own, own_layout, logits: true };
        logits.append(&mut model.forward(&mut [step]));
    }
    logits
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let [model, text] = &args[..] else {
        println!("skipped: give the paths of a .gguf file and of a text");
        return;
    };
    let text = std::fs::read_to_string(text).expect("the text is readable");
    let read = |precision, phase| {
        let model = LanguageModel::open_for(model.as_ref(), None, precision, phase)
            .expect("the model opens");
        let mut tokens = model.tokenizer.encode(&text).expect("the text has tokens");
        tokens.truncate(TOKENS);
        (read(&model, &tokens), tokens)
    };
    let (exact, tokens) = read(Precision::Exact, Phase::Prefill);
    let count = exact.len();
    let loss = |rows: &[Vec<f32>]| {
        let term = |(x, &next): (&Vec<f32>, &u32)| log_sum_exp(x) - f64::from(x[next as usize]);
        rows.iter().zip(&tokens[1..]).map(term).sum::<f64>() / (count - 1) as f64
    };
    println!("{count} tokens, loss of exact products {:.5}", loss(&exact));
    for phase in [Phase::Prefill, Phase::Decode] {
        let (rows, _) = read(Precision::Bf16, phase);
        let pairs = || exact.iter().zip(&rows);
        let divergences: Vec<f64> = pairs().map(|(p, q)| divergence(p, q)).collect();
        let same = pairs().filter(|(p, q)| greedy(p) == greedy(q)).count();
        println!(
            "{phase:?}: KL(exact || it) {:.6} nats a token on average, {:.6} at most; the same \
             first choice {same} times; loss {:.5}",
            divergences.iter().sum::<f64>() / count as f64,
            divergences.iter().copied().fold(0.0, f64::max),
            loss(&rows),
        );
    }
}
