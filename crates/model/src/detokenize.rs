//! Token ids to streamed text: never half a UTF-8 character, never past a stop string.

use crate::tokenizer::TextTokenizer;

/// Turns a stream of ids into a stream of text.
#[derive(Default, Clone)]
pub struct Detokenizer {
    pending: Vec<u8>,
    started: bool,
}

impl Detokenizer {
    /// The whole text of `tokens`.
    pub fn text(tokenizer: &TextTokenizer, tokens: &[u32]) -> String {
        let mut whole = Self::default();
        let mut text: String = tokens.iter().map(|&token| whole.push(tokenizer, token)).collect();
        text.push_str(&whole.finish());
        text
    }

    /// Text that became complete with `token`; may be empty.
    pub fn push(&mut self, tokenizer: &TextTokenizer, token: u32) -> String {
        let mut bytes = tokenizer.bytes_of(token);
        if !self.started && !bytes.is_empty() {
            self.started = true;
            if tokenizer.strips_first_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        self.take(false)
    }

    /// What is left at the end; an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        self.take(true)
    }

    fn take(&mut self, last: bool) -> String {
        let mut out = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return out;
                }
                Err(e) => {
                    let (good, bad) = self.pending.split_at(e.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(good));
                    match e.error_len() {
                        Some(n) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            self.pending = bad[n..].to_vec();
                        }
                        None if last => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            self.pending.clear();
                            return out;
                        }
                        None => {
                            self.pending = bad.to_vec();
                            return out;
                        }
                    }
                }
            }
        }
    }
}

/// Holds back text that may turn out to be the beginning of a stop string.
#[derive(Clone, Default)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopFilter {
    /// A filter for these stop strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { stops, held: String::new(), stopped: false }
    }

    /// Whether nothing can stop here: text need not be shown to it.
    pub fn is_empty(&self) -> bool {
        self.stops.is_empty()
    }

    /// Whether a stop string has appeared.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Text that may be shown now.
    pub fn push(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back when the stream ends without a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that begins `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len().min(text.len() + 1))
        .rev()
        .filter(|&n| stop.is_char_boundary(n))
        .find(|&n| text.ends_with(&stop[..n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(stops: &[&str], parts: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut filter = StopFilter::new(&stops);
        let mut out: String = parts.iter().map(|p| filter.push(p)).collect();
        if !filter.stopped() {
            out.push_str(&filter.finish());
        }
        (out, filter.stopped())
    }

    #[test]
    fn stop_strings_across_parts() {
        assert_eq!(stream(&["END"], &["abE", "N", "Dxy"]), ("ab".into(), true));
        assert_eq!(stream(&["END"], &["abE", "Nx"]), ("abENx".into(), false));
        assert_eq!(stream(&["\n\n", "Q:"], &["a\n", "b Q", ":"]), ("a\nb ".into(), true));
        assert_eq!(stream(&[""], &["a"]), ("a".into(), false));
        assert_eq!(stream(&["é!"], &["caf", "é", "?"]), ("café?".into(), false));
    }

    #[test]
    fn characters_are_never_split() {
        let mut d = Detokenizer::default();
        let euro = "€".as_bytes();
        d.pending.extend_from_slice(&euro[..2]);
        assert_eq!(d.take(false), "");
        d.pending.push(euro[2]);
        assert_eq!(d.take(false), "€");
        d.pending.extend_from_slice(&[0xff, b'a', 0xe2]);
        assert_eq!(d.take(false), "\u{fffd}a");
        assert_eq!(d.finish(), "\u{fffd}");
    }
}
