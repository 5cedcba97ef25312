"""The retrievers for LangChain, LlamaIndex and Haystack, each inside its own framework, compared with the Searcher."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from haystack import Pipeline
from haystack.components.builders import PromptBuilder
from haystack.core.errors import SerializationError
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import MetadataMode, NodeWithScore

from realmops import Passage, Searcher
from realmops.adapters import haystack, langchain, llama_index, metadata_of

QUERY = "Where was the poet Anna Berg born?"
QUERIES = [QUERY, "a ship built in Bergen", "Who sang in The Red Door?", "Norway", "rain"]
FRAMEWORKS = {"langchain": "langchain_core", "llama_index": "llama_index", "haystack": "haystack"}
OF_TEAM_A = {"filters": {"team": "a"}, "by": "words"}

Result = tuple[str, str, float | None, dict[str, Any]]


@pytest.fixture(scope="module")
def searcher(finished: Path) -> Searcher:
    return Searcher.open(finished)


def expected(passages: list[Passage]) -> list[Result]:
    """Id, text, score and metadata, written out."""
    return [
        (
            one.passage_id,
            one.text,
            one.score,
            {
                "document_id": one.document_id,
                "passage_id": one.passage_id,
                "title": one.title,
                "uri": one.uri,
                "start": one.start,
                "end": one.end,
                "page": one.page,
                "team": one.extra["team"],
            },
        )
        for one in passages
    ]


def of_langchain(documents: list[Document]) -> list[Result]:
    return [
        (str(one.id), one.page_content, one.metadata["score"], {k: v for k, v in one.metadata.items() if k != "score"})
        for one in documents
    ]


def of_llama_index(nodes: list[NodeWithScore]) -> list[Result]:
    return [(one.node_id, one.text, one.score, one.metadata) for one in nodes]


def of_haystack(result: dict[str, Any]) -> list[Result]:
    return [(one.id, one.content, one.score, one.meta) for one in result["documents"]]


# What all have


def test_each_finds_what_the_searcher_finds(searcher: Searcher, finished: Path) -> None:
    assert len({one.extra["team"] for one in searcher.search(QUERY, 3)}) == 2, "else the filter below does nothing"
    for options in ({}, OF_TEAM_A, {"by": "embeddings"}):
        found = expected(searcher.search(QUERY, 3, **options))  # type: ignore[arg-type]
        assert len(found) == 3
        for given in ({"searcher": searcher}, {"root": finished}):
            every: dict[str, Any] = {**given, **options}
            assert of_langchain(langchain.RealmRetriever(k=3, **every).invoke(QUERY)) == found
            assert of_llama_index(llama_index.RealmRetriever(k=3, **every).retrieve(QUERY)) == found
            assert of_haystack(haystack.RealmRetriever(top_k=3, **every).run(QUERY)) == found


def test_where_a_passage_stands_wins_over_a_field_of_that_name() -> None:
    passage = Passage("d", "d:0", "Title", "text", "uri", 4, 8, extra={"start": "1990", "year": 1990}, page=2)
    found = metadata_of(passage)
    assert (found["start"], found["end"], found["page"], found["year"]) == (4, 8, 2, 1990)


def test_a_retriever_must_know_what_it_searches(searcher: Searcher, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{}, {"searcher": searcher, "root": tmp_path}, {"searcher": searcher, "model": "a"}]
    for given in wrong:
        for module in (langchain, llama_index, haystack):
            with pytest.raises(ValueError, match="either searcher, or root or model"):
                module.RealmRetriever(**given)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_its_framework_a_module_names_its_extra(name: str) -> None:
    code = f"import sys; sys.modules[{FRAMEWORKS[name]!r}] = None; import realmops.adapters.{name}"
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert f"pip install 'realmops[{name.replace('_', '-')}]'" in error


# LangChain


def test_a_chain_of_langchain(searcher: Searcher) -> None:
    retriever = langchain.RealmRetriever(searcher=searcher, k=2)
    joined = RunnableLambda(lambda documents: "\n".join(one.page_content for one in documents))
    prompt = PromptTemplate.from_template("{context}\n\n{question}")
    chain = {"context": retriever | joined, "question": RunnablePassthrough()} | prompt
    texts = [one.text for one in searcher.search(QUERY, 2)]
    assert chain.invoke(QUERY).to_string() == "\n".join(texts) + f"\n\n{QUERY}"
    assert asyncio.run(chain.ainvoke(QUERY)) == chain.invoke(QUERY)


def test_langchain_calls_it_for_many_queries_at_once(searcher: Searcher) -> None:
    retriever = langchain.RealmRetriever(searcher=searcher, k=2)
    found = [expected(searcher.search(query, 2)) for query in QUERIES * 4]
    assert [of_langchain(one) for one in retriever.batch(QUERIES * 4)] == found
    assert [of_langchain(one) for one in asyncio.run(retriever.abatch(QUERIES * 4))] == found


def test_a_call_of_langchain_may_have_another_k_and_other_filters(searcher: Searcher) -> None:
    retriever = langchain.RealmRetriever(searcher=searcher, by="words")
    changed = {"k": 1, "filters": {"team": "b"}}
    found = expected(searcher.search(QUERY, 1, by="words", filters={"team": "b"}))
    assert of_langchain(retriever.invoke(QUERY, **changed)) == found
    assert of_langchain(asyncio.run(retriever.ainvoke(QUERY, **changed))) == found
    assert of_langchain(retriever.bind(**changed).invoke(QUERY)) == found


def test_the_options_of_langchains_are_written_and_read(finished: Path) -> None:
    retriever = langchain.RealmRetriever(root=finished, k=2, **OF_TEAM_A)
    again = langchain.RealmRetriever.model_validate_json(retriever.model_dump_json())
    assert again.model_dump() == retriever.model_dump()
    assert again.invoke(QUERY) == retriever.invoke(QUERY)


# LlamaIndex


def test_a_query_engine_of_llama_index(searcher: Searcher) -> None:
    retriever = llama_index.RealmRetriever(searcher, k=2)
    engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM(), response_mode=ResponseMode.COMPACT)
    passages = searcher.search(QUERY, 2)
    response = engine.query(QUERY)
    assert of_llama_index(response.source_nodes) == expected(passages)
    assert all(one.text in str(response) for one in passages), "MockLLM says its prompt again"
    assert of_llama_index(asyncio.run(engine.aquery(QUERY)).source_nodes) == expected(passages)


def test_a_node_of_llama_index_knows_its_document(searcher: Searcher) -> None:
    node = llama_index.RealmRetriever(searcher, k=1).retrieve(QUERY)[0].node
    [passage] = searcher.search(QUERY, 1)
    assert node.ref_doc_id == passage.document_id
    assert node.get_node_info() == {"start": passage.start, "end": passage.end}  # type: ignore[attr-defined]
    shown = node.get_content(MetadataMode.LLM)
    assert f"title: {passage.title}" in shown
    assert passage.passage_id not in shown


def test_llama_index_calls_it_for_many_queries_at_once(searcher: Searcher) -> None:
    retriever = llama_index.RealmRetriever(searcher, k=2)

    async def all_of_them() -> list[list[NodeWithScore]]:
        return await asyncio.gather(*(retriever.aretrieve(query) for query in QUERIES * 4))

    found = [of_llama_index(one) for one in asyncio.run(all_of_them())]
    assert found == [expected(searcher.search(query, 2)) for query in QUERIES * 4]


# Haystack


def pipeline_of(retriever: haystack.RealmRetriever) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("retriever", retriever)
    template = "{% for one in documents %}{{ one.content }} ({{ one.meta.title }})\n{% endfor %}"
    pipeline.add_component("prompt", PromptBuilder(template, required_variables=["documents"]))
    pipeline.connect("retriever.documents", "prompt.documents")
    return pipeline


def prompt_of(passages: list[Passage]) -> str:
    return "".join(f"{one.text} ({one.title})\n" for one in passages).rstrip("\n")


def test_a_pipeline_of_haystack(searcher: Searcher) -> None:
    pipeline = pipeline_of(haystack.RealmRetriever(searcher, top_k=2))
    for data, passages in (
        ({"query": QUERY}, searcher.search(QUERY, 2)),
        (
            {"query": QUERY, "top_k": 1, "filters": {"team": "b"}},
            searcher.search(QUERY, 1, filters={"team": "b"}),
        ),
    ):
        every = {"data": {"retriever": data}, "include_outputs_from": {"retriever"}}
        for result in (pipeline.run(**every), asyncio.run(pipeline.run_async(**every))):
            assert result["prompt"]["prompt"].rstrip("\n") == prompt_of(passages)
            assert of_haystack(result["retriever"]) == expected(passages)


def test_a_pipeline_of_haystack_is_written_and_read(searcher: Searcher, finished: Path) -> None:
    written = pipeline_of(haystack.RealmRetriever(root=finished, top_k=2, **OF_TEAM_A)).dumps()
    pipeline = Pipeline.loads(written, allowed_modules=["realmops.adapters.haystack"])
    assert pipeline.dumps() == written
    [prompt] = pipeline.run({"query": QUERY})["prompt"].values()
    assert prompt.rstrip("\n") == prompt_of(searcher.search(QUERY, 2, **OF_TEAM_A))  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="give it root or model"):
        pipeline_of(haystack.RealmRetriever(searcher)).dumps()


def test_haystack_opens_a_run_only_to_use_it(tmp_path: Path) -> None:
    retriever = haystack.RealmRetriever(root=tmp_path / "nothing")
    again = haystack.RealmRetriever.from_dict(retriever.to_dict())
    with pytest.raises(ValueError, match="nothing"):
        again.warm_up()
