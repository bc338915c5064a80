//! Messages of a request, and how they become token ids around the documents.

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};
use crate::template::ChatTemplate;
use crate::tokenizer::TextTokenizer;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// The person who asks.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// Word in templates and in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
}

/// Texts of a corpus that precede every prompt; part of the fingerprint.
pub(crate) struct Frame<'a> {
    pub system: &'a str,
    pub introduction: &'a str,
}

/// Ids before the documents: opening of the template, system text, introduction.
pub(crate) fn prefix(
    template: &ChatTemplate,
    tokenizer: &TextTokenizer,
    frame: &Frame<'_>,
) -> Result<Vec<u32>> {
    let head = |roles: &[Role]| -> Result<(String, String)> {
        let mut pieces = template.render(roles)?.pieces.into_iter();
        Ok((pieces.next().unwrap_or_default(), pieces.next().unwrap_or_default()))
    };
    let first = head(&[Role::System, Role::User])?;
    let long = head(&[Role::System, Role::User, Role::Assistant, Role::User])?;
    if first != long {
        return Err(ModelError::Template(
            "the text before the documents depends on the conversation, so no stored prefix can \
             precede every prompt"
                .into(),
        ));
    }
    let mut ids: Vec<u32> = tokenizer.leading_bos().into_iter().collect();
    tokenizer.append_template(&mut ids, &first.0)?;
    // A template may print the BOS itself; it stands at the head once.
    if ids.len() > 1 && tokenizer.leading_bos() == Some(ids[1]) {
        ids.remove(0);
    }
    tokenizer.append_text(&mut ids, frame.system)?;
    tokenizer.append_template(&mut ids, &first.1)?;
    tokenizer.append_text(&mut ids, frame.introduction)?;
    Ok(ids)
}

/// Ids after the documents: the request's own system text, turns, and the answer's opening.
pub(crate) fn rest(
    template: &ChatTemplate,
    tokenizer: &TextTokenizer,
    messages: &[Message],
) -> Result<Vec<u32>> {
    let mut own_system = String::new();
    let mut turns: Vec<&Message> = Vec::new();
    for message in messages {
        if message.role == Role::System {
            own_system.push_str(&message.content);
            own_system.push_str("\n\n");
        } else {
            turns.push(message);
        }
    }
    let question = match turns.first() {
        Some(m) if m.role == Role::User => &m.content,
        _ => return Err(ModelError::Template("the first turn must be the user's".into())),
    };
    let roles: Vec<Role> =
        std::iter::once(Role::System).chain(turns.iter().map(|m| m.role)).collect();
    let pieces = template.render(&roles)?.pieces;
    let mut ids = tokenizer.encode_inner(&format!("\n\n{own_system}{question}"))?;
    for (piece, turn) in pieces[2..].iter().zip(turns.iter().skip(1).map(Some).chain([None])) {
        tokenizer.append_template(&mut ids, piece)?;
        if let Some(turn) = turn {
            tokenizer.append_text(&mut ids, &turn.content)?;
        }
    }
    Ok(ids)
}
