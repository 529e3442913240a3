// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// fakeAPI answers lists, by pages, and gets, as the API server does, from objects of a file.
type fakeAPI struct {
	t       *testing.T
	objects map[string][]*unstructured.Unstructured // by resource
	// denied are resources that the user may not read.
	denied map[string]bool
	// page is the most objects that a page has, if more are asked for.
	page int
	// pages counts the pages of lists.
	pages map[string]int
	url   string
}

func newFakeAPI(t *testing.T, file string) *fakeAPI {
	t.Helper()
	api := &fakeAPI{t: t, objects: map[string][]*unstructured.Unstructured{}, denied: map[string]bool{}, pages: map[string]int{}, page: 2}
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if object.Object == nil {
			continue
		}
		resource, _ := meta.UnsafeGuessKindToResource(object.GroupVersionKind())
		if resource.Group == "cilium.io" {
			resource.Resource = strings.ToLower(object.GetKind()) + map[bool]string{true: "es", false: "s"}[strings.HasSuffix(object.GetKind(),
				"Address")]
		}
		api.objects[resource.Resource] = append(api.objects[resource.Resource], object)
	}
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	api.url = server.URL
	return api
}

// ServeHTTP implements [http.Handler].
func (a *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	parts = parts[map[string]int{"api": 2, "apis": 3}[parts[0]]:]
	namespace := ""
	if len(parts) > 2 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	resource := parts[0]
	answer := func(code int, body any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		if err := json.NewEncoder(w).Encode(body); err != nil {
			a.t.Error(err)
		}
	}
	refuse := func(err *apierrors.StatusError) { answer(int(err.ErrStatus.Code), err.Status()) }
	if a.denied[resource] {
		refuse(apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("the user may not")))
		return
	}
	if len(parts) > 1 {
		for _, object := range a.objects[resource] {
			if object.GetName() == parts[1] && object.GetNamespace() == namespace {
				answer(http.StatusOK, object.Object)
				return
			}
		}
		refuse(apierrors.NewNotFound(schema.GroupResource{Resource: resource}, parts[1]))
		return
	}
	a.list(r, resource, namespace, answer)
}

func (a *fakeAPI) list(r *http.Request, resource, namespace string, answer func(int, any)) {
	query := r.URL.Query()
	selector, err := fields.ParseSelector(query.Get("fieldSelector"))
	if err != nil {
		a.t.Error(err)
	}
	var items []any
	kind, version := "List", "v1"
	for _, object := range a.objects[resource] {
		kind, version = object.GetKind()+"List", object.GetAPIVersion()
		set := fields.Set{}
		for _, requirement := range selector.Requirements() {
			set[requirement.Field], _, _ = unstructured.NestedString(object.Object, strings.Split(requirement.Field, ".")...)
		}
		if (namespace == "" || object.GetNamespace() == namespace) && selector.Matches(set) {
			items = append(items, object.Object)
		}
	}
	if len(a.objects[resource]) == 0 {
		answer(http.StatusOK, emptyList(r.URL.Path, resource))
		return
	}
	limit, _ := strconv.Atoi(query.Get("limit"))
	if limit == 0 {
		a.t.Errorf("%s are asked for all at once", resource)
	}
	from, _ := strconv.Atoi(query.Get("continue"))
	to := min(len(items), from+min(limit, a.page))
	metadata := map[string]any{"resourceVersion": "1"}
	if to < len(items) {
		metadata["continue"] = strconv.Itoa(to)
	}
	a.pages[resource]++
	answer(http.StatusOK, map[string]any{"kind": kind, "apiVersion": version, "metadata": metadata, "items": items[from:to]})
}

// emptyList is a list of no objects of a resource of which there are none.
func emptyList(path, resource string) map[string]any {
	kinds := map[string]string{
		"resourceslices": "ResourceSliceList", "resourceclaims": "ResourceClaimList", "events": "EventList",
		"ciliumnetworkdrivernodeconfigs": "CiliumNetworkDriverNodeConfigList", "ciliumnetworkdrivernetworks": "CiliumNetworkDriverNetworkList",
		"ciliumnetworkdriveraddresses": "CiliumNetworkDriverAddressList",
	}
	parts := strings.Split(strings.Trim(path, "/"), "/")
	version := "v1"
	if parts[0] == "apis" {
		version = parts[1] + "/" + parts[2]
	}
	return map[string]any{"kind": kinds[resource], "apiVersion": version, "metadata": metav1.ListMeta{}, "items": []any{}}
}

// only leaves the API with the objects of the resource that keep says.
func (a *fakeAPI) only(resource string, keep func(*unstructured.Unstructured) bool) {
	a.objects = maps.Clone(a.objects)
	var kept []*unstructured.Unstructured
	for _, object := range a.objects[resource] {
		if keep(object) {
			kept = append(kept, object)
		}
	}
	a.objects[resource] = kept
}
