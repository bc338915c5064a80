//! What clients see.

use std::sync::Arc;

use matkv_loader_core::machine::RequestState;
use matkv_types::FinishReason;

use crate::chunks::Question;

/// A request as its client sees it.
pub(crate) struct Client {
    pub question: Question,
    pub expected: Vec<u32>,
    pub state: Option<Arc<RequestState>>,
    pub left: bool,
}

impl Client {
    /// Its answer is always the beginning of the right one, and the whole of it when it ends well.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Some(state) = &self.state else { return Ok(()) };
        state.look(|p| {
            if !self.expected.starts_with(&p.tokens) {
                return Err(format!("answer {:?}, expected {:?}", p.tokens, self.expected));
            }
            match &p.ended {
                Some(Ok(FinishReason::Stop | FinishReason::Length))
                    if p.tokens != self.expected =>
                {
                    Err(format!("it ended with {:?}, expected {:?}", p.tokens, self.expected))
                }
                Some(Ok(FinishReason::Cancelled)) if !self.left => {
                    Err("cancelled, and its client is there".into())
                }
                Some(Ok(FinishReason::Failed)) => Err("the decoder refused it".into()),
                _ => Ok(()),
            }
        })
    }
}
