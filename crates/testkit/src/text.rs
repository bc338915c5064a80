//! Pseudo-English: enough structure for a tokenizer, no meaning, the same for equal seeds.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const SUBJECTS: [&str; 12] = [
    "the keeper",
    "a ferry",
    "the old mill",
    "every winter",
    "the council",
    "a young baker",
    "the observatory",
    "their harbour",
    "one of the boats",
    "the archive",
    "a visitor",
    "the river",
];
const VERBS: [&str; 12] = [
    "carried",
    "remembered",
    "opened",
    "measured",
    "rebuilt",
    "followed",
    "crossed",
    "counted",
    "painted",
    "recorded",
    "sold",
    "watched",
];
const OBJECTS: [&str; 12] = [
    "three lanterns",
    "the northern wall",
    "its last journey",
    "a list of names",
    "the copper bell",
    "forty notebooks",
    "the narrow bridge",
    "sacks of grain",
    "the evening tide",
    "a broken clock",
    "letters from 1871",
    "the silver map",
];
const ENDINGS: [&str; 8] = [
    "before the storm",
    "in early spring",
    "without a word",
    "near the market",
    "for 26 years",
    "after the flood",
    "at low water",
    "with great care",
];

/// About `approx_words` words of sentences, in paragraphs.
pub fn text(seed: u64, approx_words: usize) -> String {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut pick = |words: &[&'static str]| *words.choose(&mut rng).unwrap_or(&"");
    let (mut out, mut words) = (String::new(), 0);
    while words < approx_words {
        let subject = pick(&SUBJECTS);
        let sentence = format!("{subject} {} {} {}.", pick(&VERBS), pick(&OBJECTS), pick(&ENDINGS));
        words += sentence.split(' ').count();
        let (first, rest) = sentence.split_at(1);
        out.push_str(&first.to_uppercase());
        out.push_str(rest);
        out.push(' ');
    }
    paragraphs(&mut rng, out.trim_end())
}

/// Turns about one sentence end in five into a paragraph end.
fn paragraphs(rng: &mut StdRng, text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for (i, sentence) in text.split(". ").enumerate() {
        if i > 0 {
            out.push_str(if rng.random_ratio(1, 5) { ".\n\n" } else { ". " });
        }
        out.push_str(sentence);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn equal_seeds_give_equal_text() {
        assert_eq!(text(7, 300), text(7, 300));
        assert_ne!(text(7, 300), text(8, 300));
        let words = text(7, 300).split_whitespace().count();
        assert!((300..312).contains(&words), "{words}");
    }
}
