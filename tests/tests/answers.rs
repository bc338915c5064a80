//! What is answered, and what is said about it.

use matkv_api::v1::{GenerateRequest, Message};
use matkv_tests::{Reply, Server, question, same_logits, text};
use tonic::Code;

const BELL: &str = "The tide bell of Veldhaven was cast in 1768 by the bell founder Greger Malm. \
                    It weighs 310 kilograms and hangs under the roof of the harbour office.";
const FERRY: &str =
    "The ferry Oske Star carries 48 passengers and leaves Brenning at half past six.";
const CITY: &str = "Zürich grüßt 東京: naïve café, Ελλάδα, Привет, 👩‍👩‍👧 and 🙂🙃. €5 ≠ £4 — “ok”…";

fn of(documents: &[&str], text: &str) -> GenerateRequest {
    let document_ids = documents.iter().map(|d| (*d).to_owned()).collect();
    GenerateRequest { document_ids, return_logits: true, ..question(text) }
}

fn mode(mode: &str, request: GenerateRequest) -> GenerateRequest {
    GenerateRequest { mode: mode.into(), ..request }
}

fn assert_same(what: &str, a: &Reply, b: &Reply) {
    assert_eq!(a.answer(), b.answer(), "{what}");
    assert!(same_logits(&a.logits, &b.logits), "{what}: other logits");
}

/// A server with documents of one, one, one and three chunks.
async fn with_documents() -> Option<Server> {
    // Exact rows: reuse of one chunk is then a full prefill, bit for bit.
    let settings = ["arena.size=256MiB", "reuse.link_tokens=32", "storage.dtype=bf16"];
    let server = Server::start(&settings).await?;
    empty_corpus(&server).await;
    let long = text(11, 250);
    let documents = [("bell", BELL), ("ferry", FERRY), ("city", CITY), ("log", &long)];
    let ingested = server.ingest(&documents).await;
    assert_eq!(ingested.errors(), [""; 0]);
    let chunks: Vec<u32> = documents.iter().map(|d| ingested.of(d.0).chunks).collect();
    assert_eq!(chunks, [1, 1, 1, 3], "the tests below count on these");
    Some(server)
}

/// Before anything is ingested, the model answers from what it knows.
async fn empty_corpus(server: &Server) {
    let request = GenerateRequest { return_logits: true, ..question("What is the sea?") };
    let reply = server.ask(request.clone()).await;
    assert!(reply.chunks.is_empty() && !reply.text.is_empty(), "{reply:?}");
    // The prefix alone is reused.
    assert!(reply.usage.cached_tokens() > 0 && reply.usage.recomputed_rows == 0);
    assert_same("empty corpus", &server.ask(mode("vanilla", request)).await, &reply);
}

#[tokio::test(flavor = "multi_thread")]
async fn reuse_answers_like_full_prefill() {
    let Some(server) = with_documents().await else { return };
    earlier_turns(&server).await;
    one_chunk(&server).await;
    three_chunks(&server).await;
    focused(&server).await;
    exact(&server).await;
    warm_and_cold(&server).await;
    retrieved(&server).await;
    named(&server).await;
    no_chunks(&server).await;
    context(&server).await;
    server.stop().await;
}

async fn one_chunk(server: &Server) {
    for (document, asked, modes) in [
        ("bell", "When was the tide bell cast?", &["matkv", "", "independent", "linked(5)"][..]),
        ("ferry", "How many passengers does the ferry carry?", &["matkv"]),
        ("city", "Où est 東京? 🙂", &["matkv"]),
    ] {
        let request = of(&[document], asked);
        let vanilla = server.ask(mode("vanilla", request.clone())).await;
        for reuse in modes {
            let reply = server.ask(mode(reuse, request.clone())).await;
            assert_same(&format!("{document}, {reuse:?}"), &vanilla, &reply);
            let (u, v) = (&reply.usage, &vanilla.usage);
            assert_eq!(u.prompt_tokens, v.prompt_tokens);
            let cached = u.cached_tokens();
            assert!(cached > 0 && cached < u.prompt_tokens, "{u:?}");
            // A single chunk stands where it was compiled: nothing is linked.
            assert_eq!(u.recomputed_rows, 0);
        }
        let none = (vanilla.usage.cached_tokens, vanilla.usage.recomputed_rows);
        assert_eq!(none, (Some(0), 0), "present, and zero");
        assert_eq!((vanilla.usage.mode.as_str(), vanilla.sources()), ("vanilla", vec!["vanilla"]));
        phases(&vanilla);
    }
}

fn phases(reply: &Reply) {
    let t = &reply.timings;
    let all = [t.queue_ms, t.retrieve_ms, t.load_ms, t.prefill_ms, t.first_token_ms, t.decode_ms];
    assert!(all.iter().all(|ms| ms.is_finite() && *ms >= 0.0 && *ms <= t.total_ms), "{t:?}");
    assert!(t.prefill_ms > 0.0 && t.first_token_ms >= t.prefill_ms, "{t:?}");
    assert_eq!(t.decode_ms > 0.0, reply.tokens.len() > 1, "{t:?}");
}

async fn three_chunks(server: &Server) {
    // Cold: the modes share no rows.
    let request = GenerateRequest { cold: true, ..of(&["log"], "Who crossed the narrow bridge?") };
    let vanilla = server.ask(mode("vanilla", request.clone())).await;
    let exact = server.ask(mode("linked(100000)", request.clone())).await;
    assert_same("everything is linked", &vanilla, &exact);
    let chunks: Vec<u32> = exact.chunks.iter().map(|c| c.tokens).collect();
    assert_eq!(chunks.iter().sum::<u32>(), server.document("log").await.tokens as u32);
    assert_eq!(exact.usage.recomputed_rows, chunks[1] + chunks[2]);

    let independent = server.ask(mode("independent", request.clone())).await;
    let linked = server.ask(request).await;
    assert_eq!((independent.usage.recomputed_rows, linked.usage.recomputed_rows), (0, 64));
    assert_eq!(independent.usage.cached_tokens(), linked.usage.cached_tokens() + 64);
    assert_eq!(
        (independent.usage.mode.as_str(), linked.usage.mode.as_str()),
        ("independent", "linked(32)")
    );
    for reply in [&vanilla, &exact, &independent, &linked] {
        assert_eq!(reply.usage.prompt_tokens, vanilla.usage.prompt_tokens);
        assert_eq!(reply.usage.completion_tokens as usize, reply.tokens.len());
        assert_eq!(reply.places(), [("log", 0), ("log", 1), ("log", 2)]);
        assert!(reply.usage.dropped_chunks.is_empty());
        phases(reply);
    }
    // Approximations differ from the exact prompt: these comparisons can fail.
    assert!(!same_logits(&independent.logits, &vanilla.logits));
    assert!(!same_logits(&linked.logits, &independent.logits));
}

/// Rows the question attends to, from none of them to all.
async fn focused(server: &Server) {
    let request = of(&["log"], "Who crossed the narrow bridge?");
    let asked = async |m: &str| server.ask(mode(m, request.clone())).await;
    let (vanilla, linked) = (asked("vanilla").await, asked("linked(32)").await);
    let none = asked("focused(0)").await;
    assert_same("nothing is chosen", &linked, &none);
    assert_eq!(none.usage.recomputed_rows, 64);
    let all = asked("focused(1)").await;
    assert_same("everything is chosen", &vanilla, &all);
    let chunks: Vec<u32> = all.chunks.iter().map(|c| c.tokens).collect();
    assert_eq!(all.usage.recomputed_rows, chunks[1] + chunks[2]);
    assert_eq!(
        (none.usage.mode.as_str(), all.usage.mode.as_str()),
        ("focused(0,32)", "focused(1,32)")
    );

    let some = asked("focused(0.25, 16)").await;
    assert_eq!(some.usage.mode, "focused(0.25,16)");
    let rows = some.usage.recomputed_rows;
    assert!(rows > 32 && rows < (chunks[1] + chunks[2]) / 2, "{rows} rows");
    let cached = some.usage.cached_tokens() + rows;
    assert_eq!(cached, none.usage.cached_tokens() + 64);
    assert!(!same_logits(&some.logits, &linked.logits));
    assert!(!same_logits(&some.logits, &vanilla.logits));
    // What is chosen depends on the question: the same again, among others or from flash.
    let cold = GenerateRequest { cold: true, ..mode("focused(0.25,16)", request.clone()) };
    assert_same("from flash", &some, &server.ask(cold).await);
    let other = mode("focused(0.5)", of(&["log"], "Where is the archive?"));
    let (again, _) = tokio::join!(asked("focused(0.25,16)"), server.ask(other));
    assert_same("beside another", &some, &again);
}

/// The first chunk is read, the others are computed with the prompt.
async fn exact(server: &Server) {
    let request = GenerateRequest { cold: true, ..of(&["log"], "What was carried to the mill?") };
    let vanilla = server.ask(mode("vanilla", request.clone())).await;
    let exact = server.ask(mode("exact", request)).await;
    assert_same("exact", &vanilla, &exact);
    let chunks: Vec<u32> = exact.chunks.iter().map(|c| c.tokens).collect();
    assert_eq!(exact.sources(), ["flash", "vanilla", "vanilla"]);
    assert_eq!(
        (exact.usage.recomputed_rows, exact.usage.mode.as_str()),
        (chunks[1] + chunks[2], "exact")
    );
    assert!(exact.usage.cached_tokens() > chunks[0]);
}

/// What earlier turns have computed is not computed again, and shows in nothing but that.
async fn earlier_turns(server: &Server) {
    let first = "What did the miller say about the flood?";
    let log = server.ask(GenerateRequest { cold: true, ..of(&["log"], first) }).await.chunk_ids();
    let backwards: Vec<String> = log.iter().rev().cloned().collect();
    for (reuse, of_chunks, chunk_ids) in [("linked(16)", 32, log), ("exact", u32::MAX, backwards)] {
        let says = async |cold, asked: &[&str]| {
            let role = |i: usize| if i.is_multiple_of(2) { "user" } else { "assistant" };
            let turns: Vec<_> = asked.iter().enumerate().map(|(i, t)| (role(i), *t)).collect();
            let request = conversation(&[], &turns);
            let request = GenerateRequest { cold, chunk_ids: chunk_ids.clone(), ..request };
            server.ask(mode(reuse, request)).await
        };
        let one = says(false, &[first]).await;
        assert_eq!(one.usage.earlier_tokens, 0, "{reuse}: nobody has asked this");
        let chunks: Vec<u32> = one.chunks.iter().map(|c| c.tokens).collect();
        assert_eq!(one.usage.recomputed_rows, of_chunks.min(chunks[1] + chunks[2]));

        let two = says(false, &[first, &one.text, "And who was there?"]).await;
        let (u, before) = (&two.usage, &one.usage);
        // All that the first turn had to compute, its answer not included.
        assert_eq!(u.earlier_tokens, before.prompt_tokens - before.cached_tokens(), "{reuse}");
        assert_eq!((u.cached_tokens(), u.recomputed_rows), (before.prompt_tokens, 0), "{reuse}");
        let computed = says(true, &[first, &one.text, "And who was there?"]).await;
        assert_eq!(
            (computed.usage.earlier_tokens, computed.usage.prompt_tokens),
            (0, u.prompt_tokens)
        );
        assert_same(reuse, &computed, &two);

        // The same again: all but the row that the first token is drawn from.
        let again = says(false, &[first, &one.text, "And who was there?"]).await;
        assert_eq!(again.usage.cached_tokens(), u.prompt_tokens - 1, "{reuse}");
        assert_same(reuse, &computed, &again);
        // Another turn of the same conversation, up to where it differs.
        let other = says(false, &[first, "Nothing.", "And who was there?"]).await;
        assert_eq!(other.usage.earlier_tokens, u.earlier_tokens, "{reuse}");
        let computed = says(true, &[first, "Nothing.", "And who was there?"]).await;
        assert_same(reuse, &computed, &other);
    }
    // Full prefill serves nobody and is served by nobody.
    for asked in ["vanilla", "focused(0.25,16)", "focused(0.25,16)"] {
        let request = conversation(&["log"], &[("user", first)]);
        assert_eq!(server.ask(mode(asked, request)).await.usage.earlier_tokens, 0, "{asked}");
    }
}

async fn warm_and_cold(server: &Server) {
    let request = of(&["log"], "What was rebuilt after the flood?");
    let cold = server.ask(GenerateRequest { cold: true, ..request.clone() }).await;
    assert_eq!(cold.sources(), ["flash"; 3]);
    for _ in 0..2 {
        let warm = server.ask(request.clone()).await;
        assert_eq!(warm.sources(), ["arena"; 3]);
        assert_same("warm", &cold, &warm);
    }
}

async fn retrieved(server: &Server) {
    let request = GenerateRequest { top_k: Some(2), ..of(&[], "Who cast the tide bell?") };
    let reply = server.ask(request).await;
    assert_eq!(reply.places()[0], ("bell", 0));
    assert_eq!(reply.chunks.len(), 2);
    let scores: Vec<f32> = reply.chunks.iter().map(|c| c.score).collect();
    assert!(scores[0] > 0.3 && scores[0] >= scores[1], "{scores:?}");
    // Named outright, the same chunks give the same answer.
    let named = of(&[], "Who cast the tide bell?");
    let named = server.ask(GenerateRequest { chunk_ids: reply.chunk_ids(), ..named }).await;
    assert_eq!(named.places(), reply.places());
    assert_same("named", &reply, &named);
}

/// Ids in place of retrieval: exactly these, in this order.
async fn named(server: &Server) {
    let asked = "How many kilograms?";
    let reply = server.ask(of(&["ferry", "bell", "ferry"], asked)).await;
    assert_eq!(reply.places(), [("ferry", 0), ("bell", 0)]);
    assert!(reply.chunks.iter().all(|c| c.score == 0.0));

    let ids = server.document("log").await.chunk_ids;
    let chunks = |ids: &[&String]| {
        let chunk_ids = ids.iter().map(|id| (*id).clone()).collect();
        GenerateRequest { chunk_ids, ..of(&[], asked) }
    };
    let there = chunks(&[&ids[2], &ids[0]]);
    let back = chunks(&[&ids[0], &ids[2]]);
    for reuse in ["vanilla", "matkv"] {
        let (a, b) = (mode(reuse, there.clone()), mode(reuse, back.clone()));
        let (a, b) = (server.ask(a).await, server.ask(b).await);
        assert_eq!(
            (a.places(), b.places()),
            (vec![("log", 2), ("log", 0)], vec![("log", 0), ("log", 2)])
        );
        assert!(!same_logits(&a.logits, &b.logits), "{reuse}: the order does not matter");
    }
    let both = GenerateRequest { document_ids: vec!["bell".into()], ..there };
    assert_eq!(server.ask(both).await.places(), [("log", 2), ("log", 0), ("bell", 0)]);
}

async fn no_chunks(server: &Server) {
    let request = GenerateRequest { top_k: Some(0), ..of(&[], "What is the sea?") };
    let reply = server.ask(request.clone()).await;
    assert!(reply.chunks.is_empty());
    assert_same("no chunks", &server.ask(mode("vanilla", request)).await, &reply);
}

/// Numbers in a message, in order.
fn numbers(text: &str) -> Vec<usize> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

/// What does not fit the context is refused, or left out from the lowest rank on.
async fn context(server: &Server) {
    let request = of(&["log"], "Who opened the archive?");
    let max_new_tokens = Some(1_000_000);
    let refused = server.try_ask(GenerateRequest { max_new_tokens, ..request.clone() }).await;
    let refused = refused.expect_err("a million tokens");
    assert_eq!(refused.code(), Code::InvalidArgument);
    let found = numbers(refused.message());
    let [need, prefix, rest, answer, context] = found[..] else { panic!("{refused:?}") };
    assert_eq!((need, answer), (prefix + rest + answer, 1_000_000));

    // Room for the first chunk of 128 tokens, and one token less than the second would need.
    let max_new_tokens = Some((context - prefix - rest - 128 - 127) as u32);
    let stop = || vec![" ".into(), ".".into()];
    let fits = GenerateRequest { max_new_tokens, stop: stop(), ..request.clone() };
    let reply = server.ask(fits).await;
    assert_eq!(reply.places(), [("log", 0)]);
    let ids = server.document("log").await.chunk_ids;
    assert_eq!(reply.usage.dropped_chunks, [ids[2].clone(), ids[1].clone()], "lowest rank first");

    // The whole context, and one token more.
    let most = (context - prefix - rest) as u32;
    let request = |n| GenerateRequest { max_new_tokens: Some(n), stop: stop(), ..request.clone() };
    let reply = server.ask(request(most)).await;
    assert_eq!((reply.chunks.len(), reply.usage.dropped_chunks.len()), (0, 3));
    let refused = server.try_ask(request(most + 1)).await.expect_err("one token too many");
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn options_of_a_request() {
    let Some(server) = with_documents().await else { return };
    conversations(&server).await;
    seeds(&server).await;
    stops(&server).await;
    one_token(&server).await;
    whole_characters(&server).await;
    stopped_at_once(&server).await;
    server.stop().await;
}

fn turn(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}

fn conversation(documents: &[&str], messages: &[(&str, &str)]) -> GenerateRequest {
    let messages = messages.iter().map(|(role, content)| turn(role, content)).collect();
    GenerateRequest { messages, ..of(documents, "") }
}

async fn conversations(server: &Server) {
    let asked = "When was the tide bell cast?";
    let plain = server.ask(of(&["bell"], asked)).await;
    let one = server.ask(conversation(&["bell"], &[("user", asked)])).await;
    assert_same("one user turn is a question", &plain, &one);

    let system = [("system", "Answer in French."), ("user", asked)];
    let history = [
        ("system", "Answer in French."),
        ("user", "How does the ferry Oske Star leave Brenning?"),
        ("assistant", "At half past six."),
        ("user", asked),
    ];
    let mut prompt_tokens = plain.usage.prompt_tokens;
    for messages in [&system[..], &history[..]] {
        let request = conversation(&["bell"], messages);
        let reply = server.ask(request.clone()).await;
        assert_same("a conversation", &server.ask(mode("vanilla", request)).await, &reply);
        assert!(reply.usage.prompt_tokens > prompt_tokens, "the turns are in the prompt");
        assert!(!same_logits(&reply.logits, &plain.logits));
        prompt_tokens = reply.usage.prompt_tokens;
    }
    // Retrieval looks for the last question.
    let request = GenerateRequest { top_k: Some(1), ..conversation(&[], &history) };
    assert_eq!(server.ask(request).await.places(), [("bell", 0)]);
}

async fn seeds(server: &Server) {
    let request = |seed, temperature, top_p| GenerateRequest {
        seed: Some(seed),
        temperature: Some(temperature),
        top_p: Some(top_p),
        ..of(&["bell"], "Tell me a story.")
    };
    let first = server.ask(request(1, 1.5, 1.0)).await;
    assert_same("the same seed", &first, &server.ask(request(1, 1.5, 1.0)).await);
    let vanilla = mode("vanilla", request(1, 1.5, 1.0));
    assert_same("the same seed, full prefill", &first, &server.ask(vanilla).await);
    let second = server.ask(request(2, 1.5, 1.0)).await;
    assert_ne!(first.tokens, second.tokens, "another seed");
    // A nucleus of one token is greedy.
    let greedy = server.ask(of(&["bell"], "Tell me a story.")).await;
    assert_same("a small nucleus", &greedy, &server.ask(request(3, 1.5, 1e-6)).await);
    assert_ne!(first.tokens, greedy.tokens);
}

async fn stops(server: &Server) {
    let request = of(&["bell"], "When was the tide bell cast?");
    let whole = server.ask(request.clone()).await;
    assert!(whole.pieces.len() >= 6, "{:?}", whole.pieces);
    // A word in the middle, a text across two pieces, and the very beginning.
    let middle = whole.pieces[3].trim().to_owned();
    let end = |s: &str| s.chars().last().map(String::from).unwrap_or_default();
    let begin = |s: &str| s.chars().next().map(String::from).unwrap_or_default();
    let across = end(&whole.pieces[3]) + &begin(&whole.pieces[4]);
    for stop in [middle, across, whole.pieces[0].clone()] {
        let at = whole.text.find(&stop).expect("it is in the answer");
        let stop = vec!["\u{1}never".into(), stop];
        let reply = server.ask(GenerateRequest { stop, ..request.clone() }).await;
        assert_eq!((reply.text.as_str(), reply.reason.as_str()), (&whole.text[..at], "stop"));
        assert!(whole.tokens.starts_with(&reply.tokens), "{:?}", reply.tokens);
        assert!(reply.tokens.len() < whole.tokens.len());
    }
}

/// The first token holds the stop string, and no other follows.
async fn stopped_at_once(server: &Server) {
    let request = of(&["bell"], "When was the tide bell cast?");
    let whole = server.ask(request.clone()).await;
    let stop = vec![whole.pieces[0].clone()];
    let reply = server.ask(GenerateRequest { stop, max_new_tokens: Some(1), ..request }).await;
    assert_eq!((reply.text.as_str(), reply.tokens.as_slice()), ("", &whole.tokens[..1]));
    assert_eq!(reply.reason, "stop");
}

async fn one_token(server: &Server) {
    let request = of(&["bell"], "Who cast the bell?");
    let long = server.ask(request.clone()).await;
    for reuse in ["matkv", "vanilla"] {
        let request = GenerateRequest { max_new_tokens: Some(1), ..mode(reuse, request.clone()) };
        let reply = server.ask(request).await;
        assert_eq!(reply.tokens, long.tokens[..1]);
        assert_eq!((reply.reason.as_str(), reply.usage.completion_tokens), ("length", 1));
        phases(&reply);
    }
}

/// Near-uniform draws give half characters: every piece is text all the same, and all programs
/// show the same text.
async fn whole_characters(server: &Server) {
    let mut not_ascii = 0;
    for seed in 1..=4 {
        let request = GenerateRequest {
            temperature: Some(80.0),
            seed: Some(seed),
            max_new_tokens: Some(64),
            ..of(&["city"], "Écris: 東京 🙂 Ελλάδα")
        };
        let reply = server.ask(request).await;
        not_ascii += usize::from(!reply.text.is_ascii());
        let seed = seed.to_string();
        let arguments = [
            "ask",
            "Écris: 東京 🙂 Ελλάδα",
            "--document",
            "city",
            "--seed",
            &seed,
            "--temperature",
            "80",
            "--max-new-tokens",
            "64",
        ];
        let shown = server.matkv(&arguments);
        let json = server.matkv(&[&["--format", "json"], &arguments[..]].concat());
        assert_eq!((shown.code, json.code), (Some(0), Some(0)), "{shown:?} {json:?}");
        let json: serde_json::Value = serde_json::from_str(&json.out).expect("JSON");
        assert_eq!(json["text"], reply.text, "seed {seed}");
        assert!(shown.out.starts_with(&format!("{}\n", reply.text)), "{:?}", shown.out);
    }
    assert!(not_ascii > 0, "the draws are meant to be strange");
}
