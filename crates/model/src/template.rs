//! The chat template of a model, rendered by minijinja and cut where the documents go.
//!
//! Message contents never pass through the template: it is rendered with a marker for each, and
//! cut at the markers. So the template's own text is encoded with control tokens, contents are
//! encoded without, and everything before the documents is the same for every request.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, context};

use crate::error::{ModelError, Result};
use crate::prompt::Role;

/// Used when a model carries no template.
const PLAIN: &str = "{% for m in messages %}{{ m['content'] }}\n\n{% endfor %}Answer:";

/// A day that templates print; a constant, so that a stored prefix does not expire at midnight.
const FIXED_DATE: &str = "01 Jan 2025";

/// A compiled chat template.
pub(crate) struct ChatTemplate {
    env: Environment<'static>,
    bos: String,
    eos: String,
}

/// Template text around the contents of messages, in order.
pub(crate) struct Rendered {
    /// `pieces[i]` stands before content `i`; the last one ends the prompt.
    pub pieces: Vec<String>,
}

impl ChatTemplate {
    pub(crate) fn new(source: Option<&str>, bos: String, eos: String) -> Result<Self> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| ModelError::Template(e.to_string()))?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |text: String| -> std::result::Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        env.add_function("strftime_now", |_format: String| FIXED_DATE);
        env.add_template_owned("chat", source.unwrap_or(PLAIN).to_owned())
            .map_err(|e| ModelError::Template(e.to_string()))?;
        Ok(Self { env, bos, eos })
    }

    /// Renders with a marker for each message's content and cuts there.
    pub(crate) fn render(&self, roles: &[Role]) -> Result<Rendered> {
        // A control character no template prints, around a number.
        let marker = |i: usize| format!("\u{1}{i}\u{1}");
        let messages: Vec<Value> = roles
            .iter()
            .enumerate()
            .map(|(i, role)| context! { role => role.as_str(), content => marker(i) })
            .collect();
        let text = self.render_text(Value::from(messages))?;
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        for (i, role) in roles.iter().enumerate() {
            let (before, after) = rest.split_once(&marker(i)).ok_or_else(|| {
                ModelError::Template(format!(
                    "the content of message {} ({}) does not appear once, in order",
                    i + 1,
                    role.as_str()
                ))
            })?;
            pieces.push(before.to_owned());
            rest = after;
        }
        pieces.push(rest.to_owned());
        if pieces.iter().any(|p| p.contains('\u{1}')) {
            return Err(ModelError::Template("a message's content appears twice".into()));
        }
        Ok(Rendered { pieces })
    }

    fn render_text(&self, messages: Value) -> Result<String> {
        let template =
            self.env.get_template("chat").map_err(|e| ModelError::Template(e.to_string()))?;
        template
            .render(context! {
                messages => messages,
                add_generation_prompt => true,
                bos_token => self.bos.clone(),
                eos_token => self.eos.clone(),
                date_string => FIXED_DATE,
            })
            .map_err(|e| ModelError::Template(format!("{e:#}")))
    }
}
