//! What the decode loop asks of a model. The real one is [`LanguageModel`]; the simulation of both
//! processes puts a small one in its place that reads the same bytes.

use matkv_model::{Detokenizer, LanguageModel, Step};
use matkv_types::KvShape;

/// A model as the decode loop sees it.
pub trait Engine {
    /// Shape of its KV rows.
    fn kv_shape(&self) -> KvShape;
    /// Tokens there are.
    fn vocab(&self) -> usize;
    /// Tokens that end an answer.
    fn end_tokens(&self) -> &[u32];
    /// Text that a token completes.
    fn text(&self, detokenizer: &mut Detokenizer, token: u32) -> String;
    /// Logits of every step's last row; false if `go_on`, asked again and again, said no.
    fn forward(
        &self,
        steps: &mut [Step<'_>],
        go_on: &mut dyn FnMut() -> bool,
        logits: &mut Vec<Vec<f32>>,
    ) -> bool;
}

impl Engine for LanguageModel {
    fn kv_shape(&self) -> KvShape {
        Self::kv_shape(self)
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn end_tokens(&self) -> &[u32] {
        self.tokenizer.end_tokens()
    }

    fn text(&self, detokenizer: &mut Detokenizer, token: u32) -> String {
        detokenizer.push(&self.tokenizer, token)
    }

    fn forward(
        &self,
        steps: &mut [Step<'_>],
        go_on: &mut dyn FnMut() -> bool,
        logits: &mut Vec<Vec<f32>>,
    ) -> bool {
        self.forward_into(steps, &mut |_| go_on(), logits)
    }
}
