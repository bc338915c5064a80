//! A language model ready to serve: configuration, tokenizer, template, weights.

use std::path::Path;

use matkv_kernels::Isa;
use matkv_types::{Digest, Fingerprint, KvShape, LengthPrefixedHasher, Precision};

use crate::config::LlamaConfig;
use crate::digest::file_digest;
use crate::error::{ModelError, Result};
use crate::forward::{Arithmetic, LastBuffers, Step, forward, forward_attended};
use crate::gguf::Gguf;
use crate::prompt::{self, Frame, Message};
use crate::template::ChatTemplate;
use crate::tokenizer::TextTokenizer;
use crate::weights::{LlamaWeights, Phase};
use crate::weights_file::WeightsDir;

/// Names the arithmetic every row is computed with; another class is another fingerprint.
const fn arithmetic_class(precision: Precision) -> &'static str {
    match precision {
        Precision::Exact => "f32 fma, powers of 2, edges added, blocks of 256 rows, bf16 own rows",
        Precision::Bf16 => {
            "bf16 products, f32 sums, odd then even, powers of 2, edges added, blocks of 256 rows, \
             int8 by block, shares of its groups, x int8 keys, int16 x int8 values, bf16 own rows"
        }
    }
}

/// Texts that precede every prompt of a corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptTexts {
    /// The corpus's system text.
    pub system: String,
    /// The line that introduces the documents.
    pub introduction: String,
}

/// An opened model. Cheap to share behind an `Arc`; all methods take `&self`.
pub struct LanguageModel {
    /// Hyper-parameters.
    pub config: LlamaConfig,
    /// Tokenizer.
    pub tokenizer: TextTokenizer,
    template: ChatTemplate,
    weights: LlamaWeights,
    digest: Digest,
    isa: Isa,
    precision: Precision,
    buffers: LastBuffers,
}

/// A model file whose header can be served: known before its weights are read.
pub struct ModelHeader<'p> {
    path: &'p Path,
    gguf: Gguf,
    config: LlamaConfig,
}

impl<'p> ModelHeader<'p> {
    /// Reads the header: quick.
    ///
    /// # Errors
    /// If the file cannot be read, is not a Llama model, or is refused.
    pub fn read(path: &'p Path) -> Result<Self> {
        let mut gguf = Gguf::open(path)?;
        let config = LlamaConfig::read(&mut gguf)?;
        Ok(Self { path, gguf, config })
    }
}

impl LanguageModel {
    /// Opens a GGUF file: refuses what cannot be served exactly, then loads and packs weights for
    /// prefill in the default precision. With a cache directory, packed weights are a file in it
    /// that every process maps.
    ///
    /// # Errors
    /// If the file cannot be read, is not a Llama model, or is refused.
    pub fn open(path: &Path, cache: Option<&Path>) -> Result<Self> {
        Self::open_for(path, cache, Precision::default(), Phase::Prefill)
    }

    /// The same in a precision, for a phase.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_for(
        path: &Path,
        cache: Option<&Path>,
        precision: Precision,
        phase: Phase,
    ) -> Result<Self> {
        Self::load(ModelHeader::read(path)?, cache, precision, phase)
    }

    /// Opens the rest of a file whose header has been read.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn load(
        header: ModelHeader<'_>,
        cache: Option<&Path>,
        precision: Precision,
        phase: Phase,
    ) -> Result<Self> {
        let ModelHeader { path, mut gguf, config } = header;
        let tokenizer = TextTokenizer::read(&gguf)?;
        if tokenizer.vocab_size() > config.vocab {
            return Err(ModelError::refused(format!(
                "its vocabulary has {} tokens and its embedding {} rows",
                tokenizer.vocab_size(),
                config.vocab
            )));
        }
        let eos = tokenizer.end_tokens().first().and_then(|&t| tokenizer.token_text(t));
        let template = ChatTemplate::new(
            gguf.text("tokenizer.chat_template"),
            tokenizer.bos_text(),
            eos.unwrap_or_default(),
        )?;
        let digest = file_digest(path, cache)?;
        let dir = cache.map(|cache| WeightsDir::new(cache, path, digest));
        let weights = LlamaWeights::read(&mut gguf, &config, precision, phase, dir.as_ref())?;
        // What opening took for a moment: tensors on their way, the tokenizer's texts.
        matkv_sys::trim_heap();
        let isa = Isa::detect();
        let buffers = LastBuffers::default();
        Ok(Self { config, tokenizer, template, weights, digest, isa, precision, buffers })
    }

    /// What decides the size of this model's KV.
    pub fn kv_shape(&self) -> KvShape {
        self.config.kv_shape()
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// What every row is computed with.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// SHA-256 of the model file.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Ids that precede the documents in every prompt.
    ///
    /// # Errors
    /// If the template's text before the documents is not the same for every conversation.
    pub fn prefix(&self, texts: &PromptTexts) -> Result<Vec<u32>> {
        let frame = Frame { system: &texts.system, introduction: &texts.introduction };
        prompt::prefix(&self.template, &self.tokenizer, &frame)
    }

    /// Ids that follow the documents: the request's messages and the opening of the answer.
    ///
    /// # Errors
    /// If the messages do not begin with the user's turn or the template refuses them.
    pub fn rest(&self, messages: &[Message]) -> Result<Vec<u32>> {
        prompt::rest(&self.template, &self.tokenizer, messages)
    }

    /// Everything that decides the bits of a chunk compiled after `prefix`.
    pub fn fingerprint(&self, prefix: &[u32]) -> Fingerprint {
        let mut rope = Vec::new();
        self.config.rope.inv_freq.iter().for_each(|f| rope.extend(f.to_le_bytes()));
        rope.extend(self.config.rope.magnitude.to_le_bytes());
        Fingerprint(
            LengthPrefixedHasher::default()
                .part(b"matkv fingerprint 1")
                .part(&self.digest.0)
                .tokens(prefix)
                .part(&rope)
                .part(arithmetic_class(self.precision).as_bytes())
                .finish(),
        )
    }

    /// Runs new rows of some sequences; returns logits of the steps that ask for them.
    ///
    /// Parallel work runs on the team the calling thread has installed.
    pub fn forward(&self, steps: &mut [Step<'_>]) -> Vec<Vec<f32>> {
        self.forward_while(steps, &mut |_| true).unwrap_or_default()
    }

    /// The same, as long as `go_on` says so before every layer, whose number it gets: nothing if it
    /// did not. Whoever must not wait for a long pass asks to stop there, and counts its progress
    /// there.
    pub fn forward_while(
        &self,
        steps: &mut [Step<'_>],
        go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Option<Vec<Vec<f32>>> {
        let mut logits = Vec::new();
        self.forward_into(steps, go_on, &mut logits).then_some(logits)
    }

    /// The same, into memory of the caller's; false if `go_on` said no.
    pub fn forward_into(
        &self,
        steps: &mut [Step<'_>],
        go_on: &mut dyn FnMut(usize) -> bool,
        logits: &mut Vec<Vec<f32>>,
    ) -> bool {
        let model = (&self.config, &self.weights);
        forward(self.arithmetic(), model, &self.buffers, steps, go_on, logits)
    }

    /// Runs a step and says what its rows attend to: for each of its segments one value a row,
    /// summed over layers, heads and the step's rows. Nothing if `go_on` said no.
    pub fn attended_while(
        &self,
        step: Step<'_>,
        go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Option<Vec<Vec<f32>>> {
        forward_attended(self.arithmetic(), &self.config, &self.weights, step, go_on)
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic { isa: self.isa, precision: self.precision }
    }
}
