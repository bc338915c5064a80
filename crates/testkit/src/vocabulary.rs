//! The vocabulary of the tiny model: three control tokens, the 256 byte symbols, some merges.

/// Names of the control tokens; their ids are their places here.
pub(crate) const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Frequent pairs of English, in the order a byte-level BPE would learn them. `Ġ` is the space.
pub(crate) const MERGES: [(&str, &str); 32] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġ", "a"),
    ("i", "n"),
    ("r", "e"),
    ("Ġt", "he"),
    ("e", "r"),
    ("o", "n"),
    ("Ġ", "s"),
    ("Ġ", "w"),
    ("n", "d"),
    ("a", "t"),
    ("o", "u"),
    ("Ġ", "o"),
    ("e", "n"),
    ("i", "s"),
    ("i", "t"),
    ("e", "s"),
    ("o", "r"),
    ("Ġ", "b"),
    ("in", "g"),
    ("e", "d"),
    ("Ġ", "f"),
    ("Ġ", "c"),
    ("Ġo", "f"),
    ("a", "n"),
    ("a", "r"),
    ("Ġa", "nd"),
    ("Ġt", "o"),
    ("Ġ", "m"),
    ("Ċ", "Ċ"),
    ("Ġw", "it"),
];

/// GPT-2's printable stand-in for each byte value.
fn byte_symbols() -> Vec<String> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut unprintable = 0;
    (0..256)
        .map(|b| {
            let code = if printable(b) {
                b
            } else {
                unprintable += 1;
                255 + unprintable
            };
            char::from_u32(code).expect("codes below 512 are characters").to_string()
        })
        .collect()
}

/// Every token, in id order.
pub(crate) fn tokens() -> Vec<String> {
    let control = CONTROL.iter().map(|&name| name.to_owned());
    let merged = MERGES.iter().map(|(left, right)| format!("{left}{right}"));
    control.chain(byte_symbols()).chain(merged).collect()
}
